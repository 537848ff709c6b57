"""What people read of selective saves."""

from titan_offload import OffloadConfig, report
from titan_offload.config import GIB
from titan_offload.stats import OffloadStats, SaveList

STATS = OffloadStats(
    saved={
        'save_ops "attention"': (6, 3 * GIB),
        "registered mandatory save aten::mm in router": (5, GIB // 2),
        "registered mandatory save aten::topk in router": (5, GIB // 2),
    }
)


def test_save_block_lists_what_is_saved_and_why():
    saves = SaveList(
        fqns=["layers.0", "layers.1"],
        rules=[
            ("registered, mandatory: aten::mm, aten::topk", ["moe.router"], "near ties"),
            ('save_ops "attention"', [], ""),
            ('save_modules "wo"', ["attention.wo"], ""),
        ],
        recomputed_attention={"sliding_attention": ["layers.0"]},
        has_own=False,
        offloads=True,
    )
    assert report.save_block(saves).splitlines() == [
        "Selective saves in 2 blocks (layers.0 .. layers.1), kept in pinned host memory; the first that matches an op "
        "decides:",
        "  registered, mandatory: aten::mm, aten::topk in moe.router (near ties)",
        '  save_ops "attention"',
        '  save_modules "wo" in attention.wo',
        "  not attention in blocks of type sliding_attention, which is recomputed: layers.0",
    ]


def test_save_block_names_the_blocks_own_list():
    saves = SaveList(["layers.0"], [("registered, preferred: aten::mm", [], "slow")], {}, has_own=True, offloads=False)
    lines = report.save_block(saves).splitlines()
    assert lines[0].startswith("Selective saves in 1 blocks (layers.0), kept on the device")
    assert 'activation_checkpoint.mode = "selective"' in lines[-1]


def test_save_line_sums_up_what_is_registered():
    line = 'saved instead of recomputed: save_ops "attention" 6 outputs, 3.000 GiB; registered 10 outputs, 1.000 GiB'
    assert report.save_line(STATS) == line
    assert report.save_line(OffloadStats()) == "saved instead of recomputed: nothing"


def test_save_line_and_scalars_tell_what_would_have_been_rerouted():
    stats = OffloadStats(num_rerouted={"layers.1": 4, "layers.2": 0})
    assert report.save_line(stats).endswith("tokens that recompute would have re-routed: layers.1 4")
    assert report.save_line(OffloadStats(num_rerouted={"layers.1": 0})).endswith("re-routed: none")
    assert report.save_scalars(stats) == {
        "selective/saved(GiB)": 0,
        "selective/rerouted_tokens/layers.1": 4,
        "selective/rerouted_tokens/layers.2": 0,
    }
    assert report.save_scalars(STATS) == {"selective/saved(GiB)": 4}


def test_start_block_without_block_inputs():
    lines = report.start_block(["layers.0", "layers.1"], OffloadConfig(mode="none"), None, 2**20).splitlines()
    assert lines[0] == (
        "Activation offload: saved outputs of 1 of 2 blocks (layers.0 .. layers.0) go to pinned host memory"
    )
    assert not any("MiB, together" in line for line in lines)


def test_start_block_of_mode_all():
    config = OffloadConfig(mode="all", keep_last=2)
    lines = report.start_block([f"layers.{i}" for i in range(4)], config, 2**30, 2**20).splitlines()
    assert lines[0] == (
        "Activation offload: saved activations of 2 of 4 blocks (layers.0 .. layers.1) go to pinned host memory"
    )
    assert lines[-1] == (
        "  on the device stay: the last 2 of each microbatch in flight, what comes after them, and whatever is under 1 "
        "MiB"
    )
