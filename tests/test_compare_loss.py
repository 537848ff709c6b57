"""scripts/compare_loss.py: reads every step in full, and tells the first difference. The runs themselves are faked."""

import subprocess
import tomllib
from pathlib import Path

import compare_loss
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.tensorboard import SummaryWriter

LEAF = st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
KEY = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
TABLE = st.dictionaries(KEY, LEAF | TEXT | st.lists(TEXT), max_size=4)


@given(st.dictionaries(KEY, TABLE | st.dictionaries(KEY, TABLE, max_size=2), max_size=3))
@settings(deadline=None)
def test_toml_that_is_written_reads_the_same(config):
    assert tomllib.loads(compare_loss.format_toml(config)) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.steps=3", (["training", "steps"], 3)),
        ("activation_offload.mode=none", (["activation_offload", "mode"], "none")),
        ('activation_offload.mode="none"', (["activation_offload", "mode"], "none")),
        ("model.converters=[]", (["model", "converters"], [])),
        ("training.dataloader.num_workers=1", (["training", "dataloader", "num_workers"], 1)),
        ("job.description=a=b", (["job", "description"], "a=b")),
    ],
)
def test_override(text, expected):
    assert compare_loss.parse_override(text) == expected


def test_seed_and_determinism_unless_the_config_says(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[training]\nsteps = 9\n[debug]\nseed = 7\n[metrics]\nlog_freq = 10\n")
    config = compare_loss.load_config(path, ["training.seq_len=64"], 3, tmp_path)
    assert config["debug"] == {"seed": 7, "deterministic": True}
    assert config["training"] == {"steps": 3, "seq_len": 64}
    assert config["metrics"]["log_freq"] == 1
    path.write_text("[debug]\ndeterministic = false\n")
    assert compare_loss.load_config(path, [], None, tmp_path)["debug"] == {"seed": 42, "deterministic": False}


def write_events(folder: Path, losses: list[float], norms: list[float], validation: dict[int, float]) -> None:
    writer = SummaryWriter(str(folder / "tb" / "run"))
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        writer.add_scalar("loss_metrics/global_avg_loss", loss, step)
        writer.add_scalar("grad_norm", norm, step)
    for step, loss in validation.items():
        writer.add_scalar("validation_metrics/loss", loss, step)
    writer.close()


LOSSES, NORMS, VALIDATION = [8.102438926696777, 7.5, 7.25], [0.59, 0.58, 0.57], {2: 7.75}
NEXT_FLOAT32 = 7.500000476837158


@pytest.mark.parametrize(
    ("losses", "norms", "validation", "first"),
    [
        (LOSSES, NORMS, VALIDATION, None),
        ([LOSSES[0], NEXT_FLOAT32, LOSSES[2]], NORMS, VALIDATION, 2),
        (LOSSES, [*NORMS[:2], 0.5700001], VALIDATION, 3),
        (LOSSES, NORMS, {2: 7.7500005}, 2),
        (LOSSES, NORMS, {}, 2),
        (LOSSES[:2], NORMS[:2], VALIDATION, 3),
    ],
)
def test_first_difference(monkeypatch, tmp_path, capsys, losses, norms, validation, first):
    runs = iter([(LOSSES, NORMS, VALIDATION), (losses, norms, validation)])
    monkeypatch.setattr(compare_loss, "train", lambda config, folder, *args: write_events(folder, *next(runs)))
    path = tmp_path / "a.toml"
    path.write_text("")
    assert compare_loss.main([str(path), str(path)]) == (0 if first is None else 1)
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[:3] == ["1", "8.102439", "8.102439"]
    marked = [row.split()[0] for row in rows if row.endswith("<-- first difference")]
    assert marked == ([] if first is None else [str(first)])
    assert rows[-1] == ("all 3 steps are identical" if first is None else f"the runs differ from step {first} on")


def test_loss_that_is_not_finite_compares_with_nothing(tmp_path):
    write_events(tmp_path, [8.0, float("nan")], [1.0, 1.0], {})
    with pytest.raises(compare_loss.InputError, match="loss of step 2 is nan"):
        compare_loss.read_curve(tmp_path)


def test_run_without_events(tmp_path):
    with pytest.raises(compare_loss.InputError, match="no losses"):
        compare_loss.read_curve(tmp_path)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("step 1\nerror: bad keep_last\nerror: bad keep_last\n" + "torchrun\n" * 200, "error: B: bad keep_last\n"),
        ("step 1\nRuntimeError: lost\n", "error: B: training ended with exit code 1; the end of its log:\nstep 1\nR"),
    ],
)
def test_failed_run_shows_why(monkeypatch, tmp_path, capsys, log, expected):
    codes = iter([0, 1])

    def run(command, stdout, **kwargs):
        assert command[-4:] == ["--job.config_file", command[-3], "--training.seq_len", "64"]
        write_events(Path(command[-3]).parent, LOSSES, NORMS, VALIDATION)
        stdout.write(log.encode())
        return subprocess.CompletedProcess(command, next(codes))

    monkeypatch.setattr(subprocess, "run", run)
    path = tmp_path / "a.toml"
    path.write_text("")
    assert compare_loss.main([str(path), str(path), "--", "--training.seq_len", "64"]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["none.toml", "none.toml"], "error: A: can't read none.toml"),
        (["a.toml", "a.toml", "--set-a", "steps=3"], "error: A: an override must look like section.key=value"),
        (["bad.toml", "a.toml"], "error: A: can't read bad.toml"),
    ],
)
def test_bad_input(monkeypatch, tmp_path, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("")
    Path("bad.toml").write_text("x = = 1")
    assert compare_loss.main(arguments) == 2
    assert expected in capsys.readouterr().err
