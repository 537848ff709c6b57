"""What a TorchTitan run shows of offload: lines, TensorBoard scalars, and at the end a table and ``summary.json``."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torchtitan.components.metrics import BaseLogger
from torchtitan.tools.logging import logger

from titan_offload import report
from titan_offload.apply import Offloader


class OffloadLogger(BaseLogger):
    """TorchTitan's metric logger, with the scalars of offload added to what it logs.

    It stands in for ``metrics_processor.logger``: so the scalars are in the same TensorBoard run, and TorchTitan's
    ``close`` at the end of a run, good or bad, is when the summary is written.

    Args:
        inner: the logger that TorchTitan made.
        offloader: where the numbers come from.
        dump_folder: the summary goes to ``<dump_folder>/offload/summary.json``.
    """

    def __init__(self, inner: BaseLogger, offloader: Offloader, dump_folder: str) -> None:
        self.inner = inner
        self._offloader = offloader
        self._path = Path(dump_folder) / "offload" / "summary.json"
        engine = offloader.engine
        self._own = report.RankReport(
            rank=dist.get_rank(),
            host=platform.node(),
            device=_device_name(),
            num_blocks=0,
            budget_bytes=engine.pool.budget_bytes,
        )
        self._reports = [self._own]

    def step_end(self) -> None:
        self._own.num_blocks = sum(map(len, self._offloader.part_fqns))
        self._own.add_step(self._offloader.step_end())

    def gather(self) -> None:
        """Collects the reports of all ranks. A collective: call it on every rank after the same step."""
        reports = [None] * dist.get_world_size()
        dist.all_gather_object(reports, self._own)
        self._reports = reports

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if "loss_metrics/global_avg_loss" not in metrics:  # a validation step
            self.inner.log(metrics, step)
            return
        stats, offloader = self._offloader.stats(), self._offloader
        own: dict[str, float] = {}
        if offloader.part_fqns:
            own |= report.scalars(stats)
            logger.info(report.step_line(stats))
        if offloader.saves.blocks:
            own |= report.save_scalars(stats)
            logger.info(report.save_line(stats))
        self.inner.log({**metrics, **own}, step)

    def close(self) -> None:
        self.inner.close()
        if dist.get_rank() == 0:
            self._write_summary()

    def _write_summary(self) -> None:
        if self._offloader.part_fqns:
            console = Console()
            console.width = max(140, console.width)  # a log file has no width; a cut number is worse than a long line
            console.print(report.rank_table(self._reports))
        if len(self._reports) < dist.get_world_size():
            print("The run ended before its last step: the other ranks did not report.")
        data = report.summary(
            self._reports,
            self._offloader.engine.config,
            self._offloader.selective,
            dist.get_world_size(),
            torch.__version__,
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(data, indent=1) + "\n")
        except OSError as error:  # must not hide the error that ended the run
            logger.warning(f"cannot write the offload summary: {error}")
        else:
            logger.info(f"offload summary: {self._path}")


def _device_name() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else f"{accelerator.type}:{os.environ.get('LOCAL_RANK', '0')}"
