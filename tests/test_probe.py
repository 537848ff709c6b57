"""The rounds of titan-offload probe on links of known speed, its processes, and what goes wrong in them."""

import functools
import threading

import pytest
import torch

from titan_offload import HostRuntime
from titan_offload.host_runtime import HostLink
from titan_offload.planner import probe
from titan_offload.planner.plan_machine import read_link
from titan_offload.planner.probe import NodeDevice, Round, measure_device, rounds_of
from titan_offload.topology import Device

CPU = torch.device("cpu")


def place(index, port=None):
    return Device(pci_address=f"0000:{index:02x}:00.0", root_port=port, numa_node=index // 2)


def below(*ports):
    return [place(index, port) for index, port in enumerate(ports)]


def test_rounds_are_all_devices_and_then_each_link_that_some_share():
    """Time by the number of boxes: 5 for four devices, 3 for two."""
    pairs = below("a", "b", "a", "b")
    assert rounds_of(pairs, 11.0) == [Round((0, 1, 2, 3), 5.0), Round((0, 2), 3.0, False), Round((1, 3), 3.0, False)]
    assert rounds_of(below("a", "a", "a"), 7.0) == [Round((0, 1, 2), 7.0)]
    assert rounds_of(below("a", "b"), 7.0) == [Round((0, 1), 7.0)]
    assert rounds_of([Device(), Device()], 7.0) == [Round((0, 1), 7.0)]


def measure_in_threads(places, gb_per_s, seconds, on_step=lambda *_: None):
    """All devices on one link. By device, its rates."""
    rounds, link = rounds_of(places, seconds), HostLink(gb_per_s)
    barriers = [threading.Barrier(len(each.members), timeout=30) for each in rounds]
    everyone = threading.Barrier(len(places), timeout=30)
    found = {}

    def run(index):
        waits = [barrier.wait for barrier in barriers]
        runtime = HostRuntime(link=link)
        found[index] = measure_device(index, rounds, runtime, CPU, waits, everyone.wait, on_step=on_step)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_alone_by_switch_and_all_at_once_are_told_apart():
    """Three devices on a link of 0.15 GB/s, two below a switch. A busy machine makes rates too low at times."""
    for _ in range(6):
        found = measure_in_threads(below("a", "a", "b"), 0.15, 2.0)
        assert [set(found[index]) for index in range(3)] == [{0, 1}, {0, 1}, {0}]
        alone = [found[index][0].alone.d2h_gb_per_s for index in range(3)]
        switch = [found[index][1].shared.h2d_gb_per_s for index in range(2)]
        shared = [found[index][0].shared.d2h_gb_per_s for index in range(3)]
        expected = [0.15] * 3 + [0.075] * 2 + [0.05] * 3
        if [*alone, *switch, *shared] == pytest.approx(expected, rel=0.2):
            return
    pytest.fail(f"not even once: {alone}, {switch}, {shared}")


def test_progress_counts_each_barrier_once_and_says_what_runs():
    steps = []
    places = below("a", "a", "b")
    measure_in_threads(places, 2.0, 0.4, on_step=lambda *step: steps.append(step))
    rounds = rounds_of(places, 0.4)
    assert steps == [(number, step) for number in range(2) for step in range(1, rounds[number].num_steps + 1)]
    assert [rounds[0].text(step) for step in range(5)] == [
        *("setting up", "device 0 alone", "device 1 alone", "device 2 alone", "all devices at once"),
    ]
    assert rounds[1].text(3) == "devices 0, 1 at once"


def host_runtime(gb_per_s, index):
    if gb_per_s[index] is None:
        raise MemoryError("no pinned host memory")
    return HostRuntime(link_gb_per_s=gb_per_s[index]), CPU


def test_a_process_per_device(tmp_path):
    """Each device has its own link here, of another speed; no rate can be above it."""
    devices = [NodeDevice(f"toy {index}", device) for index, device in enumerate(below("a", "b"))]
    done = []
    make = functools.partial(host_runtime, (0.2, 0.4))
    record = probe.probe(devices, make, 2.0, lambda *step: done.append(step))
    assert [device["name"] for device in record["devices"]] == ["toy 0", "toy 1"]
    assert [device["pci_address"] for device in record["devices"]] == ["0000:00:00.0", "0000:01:00.0"]
    assert [device["switch_group"] for device in record["devices"]] == [[0], [1]]
    for device, speed in zip(record["devices"], (0.2, 0.4), strict=True):
        assert speed / 2 < device["alone"]["d2h_gb_per_s"] <= speed * 1.01
        assert speed / 2 < device["shared"]["h2d_gb_per_s"] <= speed * 1.01
        assert device["switch"] is None
    assert record["torch"] == torch.__version__
    assert done[-1] == (6, 6, "all devices at once")
    probe.write_record(record, tmp_path / "link.json")
    link = read_link(tmp_path / "link.json")
    assert link.d2h_gb_per_s == record["devices"][0]["shared"]["d2h_gb_per_s"]
    assert link.num_devices == 2


def test_one_process_that_fails_ends_all():
    devices = [NodeDevice(f"toy {index}", device) for index, device in enumerate(below("a", "b"))]
    with pytest.raises(RuntimeError, match=r"^device 1: MemoryError: no pinned host memory$"):
        probe.probe(devices, functools.partial(host_runtime, (0.2, None)), 2.0)


def test_table_of_rates():
    port = {"d2h_gb_per_s": 25.04, "h2d_gb_per_s": 24.0, "both_d2h_gb_per_s": 1.0, "both_h2d_gb_per_s": 1.0}
    device = {"index": 0, "name": "toy", "pci_address": None, "numa_node": -1, "switch_group": [0, 1]}
    device |= {"alone": port, "switch": None, "shared": port | {"d2h_gb_per_s": 12.5}}
    table = probe.rates_table({"devices": [device]})
    assert [next(iter(column.cells)) for column in table.columns] == [
        *("0", "toy", "-", "unknown", "0, 1", "25.0 / 24.0", "-", "12.5 / 24.0"),
    ]
