"""titan-offload plan and probe from the command line: figures, output, time, and what the user may get wrong."""

import functools
import json
import subprocess
import sys
import time
import types

import pytest
import torch

import titan_offload
from titan_offload.cli import main
from titan_offload.planner import plan_report

MODELS = {
    "qwen3_8b": ("qwen3", "8B", 36),
    "qwen3_1_7b": ("qwen3", "1.7B", 28),
    "llama_70b": ("llama3", "70B", 80),
    "qwen3_30b_a3b": ("qwen3", "30B-A3B", 48),
}

STEPS = [  # model, tokens, link, copy ms, forward ms, copy over forward, slow-down of sync in percent
    ("qwen3_8b", 4096, "pcie5", 0.6053, 3.436, 0.1762, 8.81),
    ("qwen3_8b", 4096, "pcie4", 1.0824, 3.436, 0.315, 15.75),
    ("qwen3_8b", 32768, "pcie5", 4.8428, 42.881, 0.1129, 5.65),
    ("qwen3_8b", 32768, "pcie4", 8.6592, 42.881, 0.2019, 10.1),
    ("qwen3_8b", 131072, "pcie5", 19.3711, 382.63, 0.0506, 2.53),
    ("qwen3_8b", 131072, "pcie4", 34.6368, 382.63, 0.0905, 4.53),
    ("qwen3_1_7b", 4096, "pcie5", 0.3027, 0.9621, 0.3146, 15.73),
    ("qwen3_1_7b", 4096, "pcie4", 0.5412, 0.9621, 0.5625, 28.13),
    ("qwen3_1_7b", 32768, "pcie5", 2.4214, 15.3932, 0.1573, 7.87),
    ("qwen3_1_7b", 32768, "pcie4", 4.3296, 15.3932, 0.2813, 14.06),
    ("qwen3_1_7b", 131072, "pcie5", 9.6856, 167.1258, 0.058, 2.9),
    ("qwen3_1_7b", 131072, "pcie4", 17.3184, 167.1258, 0.1036, 5.18),
    ("qwen3_30b_a3b", 4096, "pcie5", 0.3027, 1.2069, 0.2508, 12.54),
    ("qwen3_30b_a3b", 4096, "pcie4", 0.5412, 1.2069, 0.4484, 22.42),
    ("qwen3_30b_a3b", 32768, "pcie5", 2.4214, 25.0482, 0.0967, 4.83),
    ("qwen3_30b_a3b", 32768, "pcie4", 4.3296, 25.0482, 0.1729, 8.64),
    ("qwen3_30b_a3b", 131072, "pcie5", 9.6856, 311.2992, 0.0311, 1.56),
    ("qwen3_30b_a3b", 131072, "pcie4", 17.3184, 311.2992, 0.0556, 2.78),
]
"""Qwen3 on one device per link at 500 TFLOP/s: the arithmetic of the article that the project starts from."""


def digits(value):
    """Half of the last printed digit."""
    return 0.5 * 10.0 ** -len(str(value).partition(".")[2]) * 1.0001


@pytest.fixture
def write(tmp_path):
    """Writes a train config, and returns its path."""

    def write(model="qwen3", flavor="8B", seq_len=4096, batch=1, more=""):
        path = tmp_path / "run.toml"
        text = f'[model]\nname = "{model}"\nflavor = "{flavor}"\n'
        path.write_text(f"{text}[training]\nseq_len = {seq_len}\nlocal_batch_size = {batch}\n{more}")
        return str(path)

    return write


@pytest.fixture
def plan(capsys):
    """The document of ``titan-offload plan ... --json``."""

    def plan(*args):
        assert main(["plan", *args, "--json"]) == 0
        out, error = capsys.readouterr()
        assert error == ""
        return json.loads(out)

    return plan


# Figures


@pytest.mark.parametrize("row", STEPS, ids=lambda row: "-".join(map(str, row[:3])))
def test_steps_to_their_printed_precision(write, plan, row):
    model, tokens, link, copy_ms, forward_ms, ratio, sync = row
    name, flavor, num_layers = MODELS[model]
    document = plan(write(name, flavor, tokens), "--link", link)
    layer = document["layers"][0]
    assert layer["d2h_ms"] == layer["h2d_ms"] == pytest.approx(copy_ms, abs=digits(copy_ms))
    assert layer["forward_ms"] == pytest.approx(forward_ms, abs=digits(forward_ms))
    assert layer["copy_over_forward"] == pytest.approx(ratio, abs=digits(ratio))
    assert layer["count"] == document["model"]["num_layers"] == num_layers
    steps = document["steps"]
    assert steps["sync"]["closed_form_unlimited_percent"] == pytest.approx(sync, abs=digits(sync))
    for form in ("closed_form_unlimited_percent", "closed_form_limited_percent", "simulated_percent"):
        assert steps["overlap"][form] == 0.0


@pytest.mark.parametrize(("sharing", "sync"), [(1, 8.81), (2, 17.62), (4, 35.24)])
def test_devices_that_share_a_link(write, plan, sharing, sync):
    document = plan(write(), "--gpus-per-node", "4", "--gpus-per-switch", str(sharing))
    got = document["steps"]["sync"]["closed_form_unlimited_percent"]
    assert got == pytest.approx(sync, abs=digits(sync))


@pytest.mark.parametrize(("model", "tokens", "gib"), [("qwen3_8b", 131072, 36.0), ("qwen3_1_7b", 32768, 3.5)])
def test_block_inputs_of_a_device(write, plan, model, tokens, gib):
    document = plan(write(*MODELS[model][:2], tokens))
    assert document["memory"]["block_inputs_gib"] == gib


def test_block_inputs_of_a_node(write, plan):
    """Llama 70B, 3 million tokens divided among 32 devices: 915.5 GiB per node of 8."""
    config = write("llama3", "70B", 3_000_000, more="[parallelism]\ncontext_parallel_degree = 32\n")
    memory = plan(config, "--nodes", "4")["memory"]
    assert memory["block_inputs_node_gib"] == pytest.approx(915.5, abs=0.05)
    assert memory["block_inputs_node_gib"] == 93_750 * 8192 * 2 * 80 * 8 / 1024**3


def test_everything_offloaded_without_ac(write, plan):
    """34 bytes per element instead of 2: 10.29 ms against a forward of 3.44 ms."""
    document = plan(write())
    assert document["steps"]["all_without_ac"]["d2h_ms"] == pytest.approx(10.29, abs=0.005)
    assert document["layers"][0]["forward_ms"] == pytest.approx(3.44, abs=0.005)


def test_a_pipeline_copies_both_ways_at_once(write, plan, tmp_path):
    """Of a measured link, the rates with both directions busy count then."""
    port = {"d2h_gb_per_s": 50, "h2d_gb_per_s": 40, "both_d2h_gb_per_s": 30, "both_h2d_gb_per_s": 20}
    link = tmp_path / "link.json"
    link.write_text(json.dumps({"devices": [{"shared": port}] * 8}))
    one_way = plan(write("llama3", "8B"), "--link", str(link))["machine"]
    config = write("llama3", "8B", batch=8, more="[parallelism]\npipeline_parallel_degree = 2\n")
    both_ways = plan(config, "--link", str(link))["machine"]
    assert (one_way["d2h_gb_per_s"], one_way["h2d_gb_per_s"]) == (50, 40)
    assert (both_ways["d2h_gb_per_s"], both_ways["h2d_gb_per_s"]) == (30, 20)


def test_the_sections_of_this_package_count(write, plan):
    more = """
[activation_checkpoint]
mode = "full"
[activation_offload]
schedule = "sync"
keep_last = 3
[selective_checkpoint]
enable = true
offload = true
"""
    document = plan(write(more=more))
    assert document["offload"]["schedule"] == "sync" and document["offload"]["keep_last"] == 3
    assert document["selective"]["offload"] is True
    assert len(document["missing"]) == 3 and document["notes"] == []
    without = plan(write())
    assert without["selective"] is None and without["offload"]["keep_last"] == 1
    assert without["missing"][-1] == '[activation_checkpoint] mode = "full"'


# Output


def test_the_verdict_comes_first_and_lines_fit(write, capsys):
    """35 of 36 block inputs move: 8 x 35 GiB fit 0.8 x 1024 GiB, but not 0.8 x 256."""

    def lines(*flags):
        assert main(["plan", write(seq_len=131072), *flags]) == 0
        return capsys.readouterr().out.splitlines()

    out = lines("--host-memory", "1024")
    assert "FITS as far as known, device memory not given; the step gets no longer than with AC alone" in out[1]
    assert max(map(len, out)) <= plan_report.PIPE_WIDTH
    assert "…" not in "".join(out)
    assert "DOES NOT FIT host memory as configured, fits with the keys below" in lines("--host-memory", "256")[1]
    assert "DOES NOT FIT device memory" in lines("--host-memory", "1024", "--gpu-memory", "80")[1]
    assert "host memory and device memory not given" in lines()[1]


def test_tables_say_what_the_document_says(write, plan, capsys):
    config = write("gpt_oss", "20b", 8192)
    document = plan(config, "--host-memory", "512")
    assert main(["plan", config, "--host-memory", "512"]) == 0
    out = capsys.readouterr().out
    for setting in document["verdict"]["settings"]:
        assert setting["key"] in out
    for variant, step in document["steps"].items():
        row = next(line for line in out.splitlines() if line.strip().startswith(plan_report.VARIANT_NAMES[variant]))
        assert plan_report.milliseconds(step["step_ms"]) in row
        assert plan_report.percent(step["vs_ac_percent"]) in row
    assert f"{document['longest']['host']:,} tokens" in out
    assert len([line for line in out.splitlines() if line.lstrip().startswith(("0 ", "1 ", "22 ", "23 "))]) == 4


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.0 %"), (-0.01, "0.0 %"), (8.809, "8.8 %"), (-18.38, "-18.4 %"), (1433.87, "1433.9 %")]
)
def test_percents(value, text):
    assert plan_report.percent(value) == text


def test_the_plan_needs_no_torch_and_less_than_five_seconds(write):
    script = (
        "import sys; from titan_offload.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    start = time.perf_counter()
    command = [sys.executable, "-c", script, "plan", write("deepseek_v3", "671B"), "--nodes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 5
    assert "deepseek_v3 671B" in done.stdout.splitlines()[0]


def test_a_reader_that_leaves_is_no_error(write):
    """As with ``titan-offload plan X.toml | head -1``."""
    command = f"{sys.executable} -m titan_offload.cli plan {write()} --json | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_public_names_are_found_where_they_are():
    """They are imported on demand; what type checkers see is the same."""
    for name in titan_offload.__all__:
        value = getattr(titan_offload, name)
        assert value.__module__ == f"titan_offload.{titan_offload._MODULES[name]}"
        assert name in dir(titan_offload)
    assert set(titan_offload._MODULES) == set(titan_offload.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'offload_apply'"):
        titan_offload.offload_apply  # noqa: B018


# What the user may get wrong

CONFIG = '[model]\nname = "qwen3"\nflavor = "8B"\n'


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("[model\n", [], "run.toml is not TOML: Expected ']' at the end of a table declaration (at line 1, column 7)"),
        (f"{CONFIG}x = [1,\n2,", [], "run.toml is not TOML: Invalid value (at line 5, the last)"),
        (f"{CONFIG}[model]\n", [], "run.toml is not TOML: Cannot declare ('model',) twice (at line 4, column 7)"),
        ("[modle]\n", [], "TorchTitan 0.2.2 has no section 'modle': did you mean model?"),
        ("model = 3\n", [], "model = 3 is not allowed: it is a section, so write [model]"),
        ("[training]\nseqlen = 3\n", [], "[training] has no key 'seqlen': did you mean seq_len?"),
        (
            "[activation_offload]\nkeep_lats = 3\n",
            [],
            "[activation_offload] has no key 'keep_lats': did you mean keep_last",
        ),
        ("[activation_offload]\nkeep_last = -3\n", [], "activation_offload.keep_last = -3 is not allowed"),
        (
            "[selective_checkpoint]\nenabled = true\n",
            [],
            "[selective_checkpoint] has no key 'enabled': did you mean enable",
        ),
        (
            "[selective_checkpoint]\nenable = 1\n",
            [],
            "selective_checkpoint.enable = 1 is not allowed: set it to true or",
        ),
        (
            "[selective_checkpoint]\nenable = true\n",
            [],
            "selective_checkpoint.enable = true does not go with activation_",
        ),
        (
            '[activation_checkpoint]\nmode = "none"\n[activation_offload]\nmode = "block_inputs"\n',
            [],
            "activation_checkpoint.mode = 'none' does not go with activation_offload.mode = \"block_inputs\"",
        ),
        (
            '[model]\nname = "qwen33"\n',
            [],
            "model.name = 'qwen33' is not known to TorchTitan 0.2.2: did you mean qwen3",
        ),
        (
            '[model]\nname = "LLaMA3"\n',
            [],
            "model.name = 'LLaMA3' is not known to TorchTitan 0.2.2: did you mean llama3",
        ),
        (
            '[model]\nname = "mamba"\n',
            [],
            "model.name = 'mamba' is not known to TorchTitan 0.2.2: it has autoparallel.de",
        ),
        ('[model]\nname = "flux"\nflavor = "flux-dev"\n', [], 'model.name = "flux" has no TransformerBlocks in layers'),
        ('[model]\nname = "vlm"\n', [], "model.name = 'vlm' has no model args that can be read without running it"),
        ('[model]\nname = "qwen3"\nflavor = "8b"\n', [], "model.flavor = '8b' is not known to qwen3: did you mean 8B"),
        (f"{CONFIG}[training]\nseq_len = 4095\n", [], "training.seq_len = 4095 is no multiple of 2, which TorchTitan"),
        (
            f'{CONFIG}[training]\nseq_len = "4k"\n',
            [],
            "training.seq_len = '4k' is not allowed: set it to a whole number",
        ),
        (
            f"{CONFIG}[training]\nseq_len = 1000\n[parallelism]\n"
            "context_parallel_degree = 4\ntensor_parallel_degree = 2\n",
            [],
            "training.seq_len = 1000 is no multiple of 16, which TorchTitan demands (tensor_parallel_degree 2 x "
            "context_parallel_degree 4 x 2): set it to 1008",
        ),
        (CONFIG, ["--link", "fast"], "--link 'fast' is no link: give pcie4, pcie5, c2c"),
        (CONFIG, ["--gpus-per-switch", "9"], "--gpus-per-switch 9 is more than --gpus-per-node 8"),
        (CONFIG, ["--plot", "no/such/plan.png"], "no/such/plan.png cannot be written: there is no folder no/such"),
        (CONFIG, ["--html", "no/such/plan.html"], "no/such/plan.html cannot be written: there is no folder no/such"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, text, flags, message):
    (tmp_path / "run.toml").write_text(text)
    assert main(["plan", str(tmp_path / "run.toml"), *flags]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.replace(f"{tmp_path}/", "").startswith(f"error: {message}")


def test_files_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "run.toml").write_bytes(b'[model]\nname = "\xff"\n')
    for path, message in (
        (tmp_path / "nope.toml", f"there is no {tmp_path}/nope.toml: give the path of a TorchTitan train config"),
        (tmp_path, f"{tmp_path} cannot be read: Is a directory"),
        (tmp_path / "run.toml", f"{tmp_path}/run.toml is not TOML: it is not UTF-8 (at line 2)"),
    ):
        assert main(["plan", str(path)]) == 2
        assert capsys.readouterr() == ("", f"error: {message}\n")


def test_sections_of_another_config_module_are_left_to_it(write, plan):
    config = write(more='[job]\ncustom_config_module = "mine"\n[my_section]\nkey = 1\n')
    assert plan(config)["missing"][0] == '[job] custom_config_module = "titan_offload.titan.job_config"'


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_probe_without_an_accelerator_says_so(tmp_path, capsys):
    assert main(["probe", "--out", str(tmp_path / "link.json")]) == 2
    assert capsys.readouterr() == (
        "",
        "error: there is no accelerator on this machine: run titan-offload probe on a node that has one\n",
    )
    assert not (tmp_path / "link.json").exists()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_probe_needs_time(capsys, seconds):
    assert main(["probe", "--seconds", seconds]) == 2
    assert capsys.readouterr().err.startswith(f"error: --seconds {float(seconds):g} is not allowed: set it to")


# Files


@pytest.fixture
def written(monkeypatch):
    """Stands for the modules that draw: what they were asked to write."""
    written = {}

    def write(kind, result, path):
        if path.name.startswith("full"):
            raise OSError(28, "No space left on device")
        written[kind] = result, path

    for module, function in (("plan_plot", "write_plot"), ("plan_page", "write_page")):
        stand_in = types.SimpleNamespace(**{function: functools.partial(write, module)})
        monkeypatch.setitem(sys.modules, f"titan_offload.planner.{module}", stand_in)
    return written


def test_picture_and_page_are_of_the_same_plan(write, written, tmp_path, capsys):
    plot, html = tmp_path / "plan.png", tmp_path / "plan.html"
    assert main(["plan", write(), "--json", "--plot", str(plot), "--html", str(html)]) == 0
    out, error = capsys.readouterr()
    document = json.loads(out)
    assert error == f"wrote {plot}\nwrote {html}\n"
    assert {kind: path for kind, (_, path) in written.items()} == {"plan_plot": plot, "plan_page": html}
    for result, _ in written.values():
        assert json.loads(json.dumps(result.to_json())).items() <= document.items()


def test_a_full_disk_is_one_sentence(write, written, tmp_path, capsys):
    assert main(["plan", write(), "--plot", str(tmp_path / "full.png")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/full.png cannot be written: No space left on device\n"
