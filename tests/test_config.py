"""OffloadConfig: what is allowed, what is refused and with which words, and the conversions to bytes."""

import dataclasses
import re
import subprocess
import sys

import pytest

from titan_offload.config import GIB, LIMITS, MIB, MODES, ON_EXHAUSTED, SCHEDULES, OffloadConfig

COUNTS = ("keep_last", "prefetch_lookahead", "max_inflight_offloads")
SIZES = ("min_offload_mib", "pinned_budget_gib")

BAD = [
    *[("mode", value, '"none", "block_inputs", "all"') for value in ("block_input", "", "None", None, 1, True)],
    *[("schedule", value, '"overlap", "sync"') for value in ("async", "Overlap", None, 0)],
    *[("on_exhausted", value, '"keep", "error"') for value in ("raise", "", None, False)],
    *[("limit", value, '"memory", "link"') for value in ("Link", "", None, True)],
    *[
        ("host_memory_fraction", value, "above 0 and at most 1")
        for value in (0, 0.0, -0.1, 1.0001, 80, float("nan"), float("inf"), "0.8", None, True)
    ],
    *[("measure_link", value, "true or false") for value in (1, 0, "true", None)],
    *[(key, value, "whole number >= 0") for key in COUNTS for value in (-1, 1.0, 0.5, "1", None, True, False)],
    *[
        (key, value, "number >= 0")
        for key in SIZES
        for value in (-1, -0.001, float("nan"), float("inf"), -float("inf"), "1", None, True)
    ],
]


@pytest.mark.parametrize(("key", "value", "allowed"), BAD)
def test_bad_value_is_refused_with_key_value_and_what_is_allowed(key, value, allowed):
    """Guards: each `_check_*`."""
    with pytest.raises(ValueError, match=re.escape(f"activation_offload.{key} = ")) as error:
        OffloadConfig(**{key: value})
    text = str(error.value)
    assert repr(value) in text
    assert allowed in text
    assert "set it to" in text


def test_the_limit_of_the_link_is_for_blocks_that_are_recomputed():
    with pytest.raises(ValueError, match=r'limit = "link" does not go with activation_offload.mode = "all".*Set mode'):
        OffloadConfig(mode="all", limit="link")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("mode", value) for value in MODES],
        *[("schedule", value) for value in SCHEDULES],
        *[("on_exhausted", value) for value in ON_EXHAUSTED],
        *[("limit", value) for value in LIMITS],
        *[("host_memory_fraction", value) for value in (1, 1.0, 0.5, 1e-6)],
        *[("measure_link", value) for value in (True, False)],
        *[(key, value) for key in COUNTS for value in (0, 1, 1000)],
        *[(key, value) for key in SIZES for value in (0, 0.0, 1, 0.5, 1e-9, 1024.0)],
    ],
)
def test_good_value_is_taken_as_it_is(key, value):
    assert getattr(OffloadConfig(**{key: value}), key) == value


def test_defaults_are_those_of_the_design():
    assert dataclasses.asdict(OffloadConfig()) == {
        "mode": "block_inputs",
        "schedule": "overlap",
        "keep_last": 1,
        "prefetch_lookahead": 1,
        "max_inflight_offloads": 2,
        "min_offload_mib": 1.0,
        "pinned_budget_gib": 0.0,
        "host_memory_fraction": 0.8,
        "on_exhausted": "keep",
        "limit": "memory",
        "measure_link": False,
    }


def test_limit_link_needs_overlap():
    with pytest.raises(ValueError, match=r"limit = .link. does not go with .*schedule"):
        OffloadConfig(limit="link", schedule="sync")


def test_config_is_frozen_and_takes_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().mode = "none"
    with pytest.raises(TypeError):
        OffloadConfig("none")


@pytest.mark.parametrize(
    ("mib", "num_bytes"), [(0, 0), (0.0, 0), (1.0, MIB), (2, 2 * MIB), (0.5, MIB // 2), (1.5 / MIB, 2), (1e-12, 1)]
)
def test_min_offload_bytes_rounds_up(mib, num_bytes):
    """A tensor of fewer bytes than asked for must not move. Guards: `ceil` in `min_offload_bytes`."""
    assert OffloadConfig(min_offload_mib=mib).min_offload_bytes == num_bytes


@pytest.mark.parametrize(
    ("gib", "num_bytes"),
    [(0, None), (0.0, None), (1, GIB), (1.5, GIB * 3 // 2), (1.5 / GIB, 1), (0.5 / GIB, 0), (1e-12, 0), (5e-324, 0)],
)
def test_budget_bytes_rounds_down_and_only_zero_means_no_limit(gib, num_bytes):
    """A budget that is too small for one byte is a budget of 0 bytes. Guards: `== 0` and `int` in `budget_bytes`."""
    budget = OffloadConfig(pinned_budget_gib=gib).budget_bytes
    assert budget == num_bytes
    assert (budget is None) == (num_bytes is None)


def test_config_needs_no_torch():
    """A planner on a laptop reads it. (The package's own __init__ imports torch: the file is loaded by itself.)"""
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('config', {sys.modules['titan_offload.config'].__file__!r})\n"
        "module = sys.modules['config'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.OffloadConfig()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({}, []),
        ({"schedule": "sync"}, []),
        ({"schedule": "sync", "prefetch_lookahead": 2, "keep_last": 2}, ["prefetch_lookahead"]),
        ({"schedule": "sync", "max_inflight_offloads": 0}, ["max_inflight_offloads"]),
        ({"mode": "none", "keep_last": 2, "schedule": "sync"}, ["schedule", "keep_last"]),
        ({"on_exhausted": "error"}, []),
        ({"host_memory_fraction": 0.5}, []),
        ({"host_memory_fraction": 0.5, "pinned_budget_gib": 1}, ["host_memory_fraction"]),
    ],
)
def test_keys_without_effect(settings, idle):
    assert OffloadConfig(**settings).keys_without_effect() == idle
