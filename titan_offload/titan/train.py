"""Entry point: TorchTitan training that also runs on a machine with no accelerator.

    torchrun --nproc_per_node 2 -m titan_offload.titan.train --job.config_file train_configs/debug_cpu.toml

Where there is an accelerator this runs stock TorchTitan. Where there is none it first repairs, in this process only,
what TorchTitan 0.2.2 takes for granted of a device: each repair is one function below, with its reason. They serve
tests and trials; nobody pretrains on them.

On any machine it adds two things. A mistake in the config ends as one line, ``error: ...``, with exit code 2: whatever
raises ValueError or FileNotFoundError while the config is parsed or the trainer is built. What fails in training keeps
its traceback. And where stderr is a terminal, rank 0 shows steps and time left.
"""

import contextlib
import inspect
import logging
import os
import platform
import resource
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, SupportsFloat

import torch
import torch.distributed as dist
import torchtitan.protocols.train_spec as train_spec_module
import torchtitan.tools.utils as titan_utils
import torchtitan.train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

USER_ERROR_EXIT_CODE = 2

# ---- repairs for a machine with no accelerator ----------------------------------------------------------------------


class HostDeviceModule:
    """``torch.cpu``, and the queries that TorchTitan makes of ``torch.cuda`` and that ``torch.cpu`` lacks.

    Memory is that of the host and of this process. There is no allocator to ask, so the peak is that of the whole
    process since its start, and cannot be reset.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """An index: ``torch.cpu.current_device()`` is the string "cpu", which ``barrier(device_ids=...)`` refuses."""
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return f"CPU ({platform.processor() or platform.machine()})"

    def get_device_properties(self, device: Any = None) -> Any:
        """An object whose ``total_memory`` is the host's, in bytes."""
        return _HostProperties()

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """The keys of ``torch.cuda.memory_stats`` that TorchTitan reads."""
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "active_bytes.all.peak": peak_bytes,
            "reserved_bytes.all.peak": peak_bytes,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


class _HostProperties:
    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def name_the_cpu_as_device() -> None:
    """Put "cpu" where TorchTitan falls back to "cuda".

    ``get_device_info`` answers "cuda" when it finds no accelerator, and other modules import the two names it was
    asked for. Those already loaded hold the wrong ones, so they are corrected too; the order of imports is then free.
    """
    wrong_module = titan_utils.device_module
    device_type, device_module = "cpu", HostDeviceModule()
    titan_utils.get_device_info = lambda: (device_type, device_module)
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and vars(module).get("device_module") is wrong_module:
            module.device_module = device_module
        if name.startswith("torchtitan.") and vars(module).get("device_type") == "cuda":
            module.device_type = device_type


_histc = torch.histc


def histc_of_integers(
    input: torch.Tensor, bins: int = 100, min: SupportsFloat = 0, max: SupportsFloat = 0, **kwargs: Any
) -> torch.Tensor:
    """``torch.histc`` that also counts integers on the CPU, as CUDA does: the counts have the dtype of the input.

    The MoE router counts tokens per expert with it. https://github.com/pytorch/pytorch/issues/74236
    """
    if input.is_cpu and not input.is_floating_point():
        # float64 holds every integer up to 2**53, so no expert index and no count is rounded.
        return _histc(input.double(), bins, min, max, **kwargs).to(input.dtype)
    return _histc(input, bins, min, max, **kwargs)


def let_histc_count_integers() -> None:
    torch.histc = histc_of_integers


class ProfileWithoutAccelerator(torch.profiler.profile):
    """``torch.profiler.profile`` that leaves out an activity of None.

    That is what TorchTitan passes for the accelerator where there is none, and the profiler refuses it.
    """

    def __init__(self, *, activities: Iterable[Any] | None = None, **kwargs: Any):
        known = None if activities is None else [activity for activity in activities if activity is not None]
        super().__init__(activities=known, **kwargs)


def let_profiler_run_without_accelerator() -> None:
    torch.profiler.profile = ProfileWithoutAccelerator


def reduce_gradients_by_plain_sums(model_parts: list[nn.Module]) -> None:
    """Tell FSDP2 to scale outside the collective.

    TorchTitan sets a gradient divide factor, which FSDP2 hands to NCCL as a pre-multiplied sum; gloo has none.
    https://github.com/pytorch/pytorch/pull/155915 added the switch.
    """
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def refuse_what_the_cpu_cannot_do(job_config: JobConfig) -> None:
    """Raise ValueError for settings that would fail far from their cause."""
    needs_accelerator = {
        "profiling.enable_memory_snapshot": job_config.profiling.enable_memory_snapshot,
        "training.enable_cpu_offload": job_config.training.enable_cpu_offload,
    }
    for key, enabled in needs_accelerator.items():
        if enabled:
            raise ValueError(f"{key} = true needs an accelerator, and this machine has none: set it to false")


def refuse_tied_embeddings(job_config: JobConfig, parallel_dims: ParallelDims) -> None:
    """Raise ValueError, before the model is built, if FSDP2 would refuse the model in its first forward.

    TorchTitan 0.2.2 puts the two users of a tied weight into different FSDP groups. torch >= 2.12 refuses that; before,
    the two were silently trained apart. https://github.com/pytorch/torchtitan/issues/2252
    """
    model = job_config.model
    flavors = train_spec_module.get_train_spec(model.name).model_args
    untied = [name for name, args in flavors.items() if not getattr(args, "enable_weight_tying", False)]
    if model.flavor not in untied and parallel_dims.fsdp_enabled and torch.__version__ >= (2, 12):
        raise ValueError(
            f"model.flavor = {model.flavor!r} of {model.name} ties its embeddings, and FSDP2 of torch "
            f"{torch.__version__} refuses a tied weight as TorchTitan 0.2.2 shards it. Choose a flavor that does not "
            f"tie them ({', '.join(untied)}), or replicate instead of sharding "
            "(parallelism.data_parallel_shard_degree = 1, parallelism.data_parallel_replicate_degree = number of ranks)"
        )


def repair_for_cpu() -> bool:
    """Make TorchTitan run on the CPU if there is no accelerator.

    Returns:
        Whether the repairs were needed. Where they were not, nothing was changed.
    """
    if torch.accelerator.is_available():
        return False
    name_the_cpu_as_device()
    let_histc_count_integers()
    let_profiler_run_without_accelerator()
    return True


# ---- what the entry point adds on any machine -----------------------------------------------------------------------


class OffloadTrainer(torchtitan.train.Trainer):
    """TorchTitan's Trainer; with the CPU repairs that need a config or a model, where they are needed."""

    # TorchTitan records what its own __init__ raises in a file, with its traceback, and torchrun prints that: it is
    # called unwrapped here so that a mistake in the config is not recorded. All else is, as before.
    @record
    def __init__(self, job_config: JobConfig):
        self.on_cpu = not torch.accelerator.is_available()
        self._show_step: Callable[[int], None] | None = None
        with user_errors_end_in_one_line():
            inspect.unwrap(torchtitan.train.Trainer.__init__)(self, job_config)
        if self.on_cpu:
            reduce_gradients_by_plain_sums(self.model_parts)

    def init_distributed(self) -> ParallelDims:
        # The first thing of __init__ that a subclass can reach, and the last before tokenizer, data and model.
        refuse_unknown_flavor(self.job_config)
        warn_if_converter_is_missing(self.job_config)
        if self.on_cpu:
            refuse_what_the_cpu_cannot_do(self.job_config)
        parallel_dims = super().init_distributed()
        if self.on_cpu:
            refuse_tied_embeddings(self.job_config, parallel_dims)
        return parallel_dims

    def train(self) -> None:
        if dist.get_rank() != 0 or not sys.stderr.isatty():
            return super().train()
        with progress_shown(self.job_config.training.steps) as self._show_step:
            return super().train()

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        super().train_step(data_iterator)
        if self._show_step is not None:
            self._show_step(self.step)


def warn_if_converter_is_missing(job_config: JobConfig) -> None:
    """The sections are known to the config parser whether or not the converter that reads them is named."""
    if hasattr(job_config, "activation_offload") and "titan_offload" not in job_config.model.converters:
        logger.warning(
            '[activation_offload] and [selective_checkpoint] have no effect: add "titan_offload" to model.converters'
        )


def refuse_unknown_flavor(job_config: JobConfig) -> None:
    """Raise ValueError where TorchTitan raises a bare KeyError."""
    flavors = train_spec_module.get_train_spec(job_config.model.name).model_args
    if job_config.model.flavor not in flavors:
        raise ValueError(
            f"model.flavor = {job_config.model.flavor!r} is none of {job_config.model.name}'s: {', '.join(flavors)}"
        )


@contextlib.contextmanager
def progress_shown(total_steps: int) -> Iterator[Callable[[int], None]]:
    """A line on the terminal with steps done and time left; yields the function to call after each step."""
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, left:"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    tasks = []

    def show_step(step: int) -> None:
        # Made late: only now is it known at which step a resumed run started.
        if not tasks:
            tasks.append(progress.add_task("training", total=total_steps, completed=step - 1))
        progress.update(tasks[0], completed=step)

    # Log lines written straight to the terminal would be drawn over the bar. rich replaces sys.stdout by one that
    # prints above it; TorchTitan's handler still holds the old one.
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout and sys.stdout.isatty()
    ]
    plain_stdout = sys.stdout
    with progress:
        for handler in handlers:
            handler.setStream(sys.stdout)
        try:
            yield show_step
        finally:
            for handler in handlers:
                handler.setStream(plain_stdout)


def exit_with_error(text: str) -> NoReturn:
    """Print a user's mistake as one line on stderr and exit with code 2."""
    sys.stderr.write(f"error: {' '.join(text.split())}\n")  # in one piece: other ranks write to the same terminal
    sys.stderr.flush()
    raise SystemExit(USER_ERROR_EXIT_CODE)


@contextlib.contextmanager
def user_errors_end_in_one_line() -> Iterator[None]:
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if not {"titan_offload", "torchtitan"} & set(Path(frame.filename).parts):
            # No check of ours or TorchTitan's: say whose, lest a bug look like a mistake in the config.
            text += f" ({type(error).__name__} at {frame.filename}:{frame.lineno})"
        exit_with_error(text)


def check_command_line() -> None:
    """Parse the config once, silently: TorchTitan parses it again, but logs a traceback for a missing file."""
    logging.disable(logging.CRITICAL)
    try:
        ConfigManager().parse_args(sys.argv[1:])
    except (ValueError, OSError) as error:
        # TorchTitan's text for an unknown key names a script that its wheel does not have.
        text = str(error).replace("NGPU=1 ./run_train.sh", "python -m titan_offload.titan.train")
        exit_with_error(f"config: {text}")
    finally:
        logging.disable(logging.NOTSET)
    if "LOCAL_RANK" not in os.environ:
        exit_with_error("start this with torchrun: torchrun --nproc_per_node 2 -m titan_offload.titan.train ...")


def main() -> None:
    """Train as the command line says. Ends like TorchTitan's own main, or with exit code 2 for a user's mistake."""
    repair_for_cpu()
    check_command_line()
    try:
        torchtitan.train.main(OffloadTrainer)
    except SystemExit:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


if __name__ == "__main__":
    main()
