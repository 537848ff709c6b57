"""What a TorchTitan run shows of offload: lines, TensorBoard scalars, and at the end a table and ``summary.json``."""

import os
import platform
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torchtitan.components.metrics import BaseLogger
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from titan_offload import host_report, report
from titan_offload.apply import Offloader
from titan_offload.config import GIB
from titan_offload.host_memory import read_host_memory, read_process_memory
from titan_offload.planner import make_plan
from titan_offload.planner.plan_input import plan_input_of
from titan_offload.planner.plan_machine import parse_link, plan_machine
from titan_offload.run_folder import RunFolder, verdict, was_killed_for_memory
from titan_offload.share import HostShare, log_progress

DEFAULT_LINK = "pcie5"

NUM_TIMED_STEPS = 100
"""The last steps, whose median is a run's step time."""


class OffloadLogger(BaseLogger):
    """TorchTitan's metric logger, with the scalars of offload added to what it logs.

    It stands in for ``metrics_processor.logger``: so the scalars are in the same TensorBoard run, and TorchTitan's
    ``close`` at the end of a run, good or bad, is when the summary is written.

    Args:
        inner: the logger that TorchTitan made.
        offloader: where the numbers come from.
        job_config: of the run; files go to ``<dump_folder>/offload``, see `run_folder`.
    """

    def __init__(self, inner: BaseLogger, offloader: Offloader, job_config: JobConfig) -> None:
        self.inner = inner
        self._offloader = offloader
        self._folder = RunFolder(Path(job_config.job.dump_folder) / "offload")
        self._job_config = job_config
        self._log_freq = job_config.metrics.log_freq
        self._num_steps = job_config.training.steps
        self._share: HostShare | None = None
        self._record: host_report.Record | None = None
        self._state: host_report.Record = {}
        self._can_write = True
        self._own = report.RankReport(
            rank=dist.get_rank(),
            host=platform.node(),
            device=_device_name(),
            num_blocks=0,
            budget_bytes=None,
        )
        self._reports = [self._own]
        self._is_finished = False
        self._last_end: float | None = None
        self._step_s: deque[float] = deque(maxlen=NUM_TIMED_STEPS)

    # Before step 1

    def start(self, share: HostShare) -> None:
        """Shows and writes what the ranks settled. Nothing is pinned yet."""
        self._share = share
        self._own.budget_bytes, self._own.need_bytes = share.own.budget_bytes, share.own.need_bytes
        self._record = host_report.budget_record(share.budgets, self._offloader.engine.config)
        if dist.get_rank() == 0:
            self._record["plan"] = self._plan(share)
            self._tell_of_the_last_run()
            _print(host_report.rank_table(self._record))
            for line in [*host_report.host_lines(self._record), *host_report.advice(self._record)]:
                logger.info(line)
            self._write(self._folder.write_budget, self._record)

    def _plan(self, share: HostShare) -> dict[str, Any] | None:
        """What is foretold of this run: with the speeds of its links if they were measured, else with those that
        ``titan-offload plan`` takes."""
        hosts = Counter(budget.facts.host for budget in share.budgets)
        try:
            on_cpu = self._offloader.engine.runtime.device_type == "cpu"
            given = plan_input_of(self._job_config, len(share.budgets), on_cpu)
            machine = plan_machine(parse_link(DEFAULT_LINK), nodes=len(hosts), gpus_per_node=max(hosts.values()))
            if share.links:
                rates = [link.shared.bytes_per_s(given.job.pipeline_parallel > 1) for link in share.links.values()]
                d2h, h2d = (min(speeds) / 1e9 for speeds in zip(*rates, strict=True))
                machine = replace(machine, d2h_gb_per_s=d2h, h2d_gb_per_s=h2d)
            return make_plan(given.model, given.job, machine, given.offload, given.selective).to_json()
        except ValueError as error:  # of a model that the planner does not know, say
            logger.info(f"no plan of this run: {error}")
            return None

    def _tell_of_the_last_run(self) -> None:
        """If it was killed for memory, and nobody may have noticed."""
        try:
            last = self._folder.budget()
        except ValueError:
            return
        if self._folder.summary(last) is None and was_killed_for_memory(last):
            logger.warning(f"The last run with this dump_folder: {' '.join(verdict(self._folder, last))}")

    def links(self, share: HostShare) -> None:
        """Shows and writes the measured speeds of all links."""
        self._record = host_report.budget_record(share.budgets, self._offloader.engine.config, share.links)
        if dist.get_rank() == 0:
            self._record["plan"] = self._plan(share)
            _print(host_report.rank_table(self._record))
            self._write(self._folder.write_budget, self._record)

    def pinning(self, done: int, total: int) -> None:
        """This rank has pinned ``done`` of ``total`` bytes."""
        log_progress(done, total)
        self._write_state(f"pinned {report.gib(done)} of {report.gib(total)} GiB")

    def _host_scalars(self) -> dict[str, float]:
        """Of the last `_write_state`: TorchTitan logs the first step and each ``log_freq``-th right after it."""
        if self._share is None:
            return {}
        return {
            "offload/pinned_need(GiB)": (self._share.own.need_bytes or 0) / GIB,
            "offload/pinned_budget(GiB)": self._share.own.budget_bytes / GIB,
            "offload/host_free(GiB)": self._state["free_bytes"] / GIB,
            "offload/process_shmem(GiB)": self._state["process"]["rss_shmem_bytes"] / GIB,
        }

    def _write_state(self, phase: str) -> None:
        if self._record is None:  # nothing is moved
            return
        pool, own = self._offloader.engine.pool, self._own
        self._state = {
            "phase": phase,
            "step": own.num_steps,
            "free_bytes": read_host_memory().free_bytes,
            "pinned_bytes": pool.bytes_pinned,
            "peak_pinned_bytes": pool.peak_bytes_pinned,
            "kept_bytes": host_report.kept_for_lack_of_memory(own.last_step),
            "process": asdict(read_process_memory()),
        }
        self._write(self._folder.write_state, self._record, own.rank, self._state)

    def _write(self, write: Callable[..., None], *args: Any) -> None:
        """A folder that cannot be written is one warning: it must not end a run."""
        if not self._can_write:
            return
        try:
            write(*args)
        except OSError as error:
            self._can_write = False
            logger.warning(f"cannot write what offload reports: {error}")

    # Steps

    def step_end(self, step: int) -> None:
        """Ends TorchTitan's step ``step``, on every rank."""
        self._own.num_blocks = sum(map(len, self._offloader.part_fqns))
        self._own.add_step(self._offloader.step_end())
        self._time_step()
        if self._own.num_steps == 1 and self._record is not None:
            self._compare_with_need()
        if self._own.num_steps == 1 or step % self._log_freq == 0 or step == self._num_steps:
            self._write_state(f"after step {step}")
        if step == self._num_steps:
            self._is_finished = True
            self.gather()

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
            own |= report.scalars(stats) | self._host_scalars()
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
            _print(report.rank_table(self._reports))
        if not self._is_finished and dist.get_world_size() > 1:
            print("The run ended before its last step: the other ranks did not report.")
        data = report.summary(
            self._reports,
            self._offloader.engine.config,
            self._offloader.selective,
            dist.get_world_size(),
            torch.__version__,
        )
        # The start tells whose summary it is: a folder may hold files of several runs.
        data |= {
            "started": None if self._record is None else self._record["started"],
            "step": self._own.num_steps,
            "finished": self._is_finished,
        }
        self._write(self._folder.write_summary, data)
        if self._can_write:
            logger.info(f"offload summary: {self._folder.path / 'summary.json'}")

    def _time_step(self) -> None:
        now = time.perf_counter()
        if self._last_end is not None:
            self._step_s.append(now - self._last_end)
            self._own.step_ms = statistics.median(self._step_s) * 1e3
        self._last_end = now

    def _compare_with_need(self) -> None:
        """Warns where the first step took another amount of pinned memory than was expected before it."""
        rank = self._record["ranks"][self._own.rank]
        if line := host_report.need_warning(rank, self._own.last_step):
            logger.warning(line)


def _device_name() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else f"{accelerator.type}:{os.environ.get('LOCAL_RANK', '0')}"


def _print(table: Table) -> None:
    console = Console()
    console.width = max(180, console.width)  # a log file has no width; a cut number is worse than a long line
    console.print(table)
