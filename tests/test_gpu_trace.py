"""Traces of a profiler: written by hand in Kineto's format, with known answers, and by the profiler itself on a CPU."""

import gzip
import itertools
import json
import random
import time

import pytest
from gpu_parts.trace import LABELS, NEAR_US, Span, analyse, read_spans
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from toy import make_model, make_tokens, offload

FORWARD, BACKWARD = 11, 12  # threads
MAIN, SIDE_D2H, SIDE_H2D, NCCL = 7, 20, 24, 28  # streams
MIB = 1024**2
D2H, H2D, D2D = (
    f"Memcpy {way}" for way in ("DtoH (Device -> Pinned)", "HtoD (Pinned -> Device)", "DtoD (Device -> Device)")
)


def complete(category, name, start, end, pid, tid, args):
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def work(category, name, start, end, stream=MAIN, correlation=0, **args):
    args |= {"device": 0, "context": 1, "stream": stream, "correlation": correlation}
    return complete(category, name, start, end, 0, stream, args)


def kernel(name, start, end, stream=MAIN, correlation=0):
    return work("kernel", name, start, end, stream, correlation)


def memcpy(name, start, end, stream, correlation=0, num_bytes=MIB):
    return work("gpu_memcpy", name, start, end, stream, correlation, bytes=num_bytes)


def host(category, name, start, end, thread=FORWARD, **args):
    return complete(category, name, start, end, 1000, thread, args)


def call(name, start, correlation, thread=FORWARD, category="cuda_runtime", length=4):
    return host(category, name, start, start + length, thread, cbid=211, correlation=correlation)


def write(path, events):
    thread = {"ph": "M", "name": "thread_name", "pid": 0, "tid": MAIN, "ts": 0.0, "args": {"name": "stream 7"}}
    flow = {"ph": "s", "id": 1, "pid": 1000, "tid": FORWARD, "ts": 0.5, "cat": "ac2g", "name": "ac2g"}
    end = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1e6}
    document = {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": [thread, flow, *events, end]}
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        json.dump(document, file)
    return path


@pytest.fixture
def read(tmp_path):
    return lambda *events: read_spans(write(tmp_path / "trace.json", events))


def kinds(spans):
    return {span.name: span.kind for span in spans}


# Spans


def test_work_is_sorted_by_kind(read):
    spans = read(
        host("user_annotation", "Offload::d2h (layers.3)", 0, 20),
        call("cudaMemcpyAsync", 5, 1),
        memcpy(D2H, 10, 30, SIDE_D2H, 1),
        kernel("gemm", 0, 40),
        kernel("ncclDevKernel_AllGather", 0, 10, NCCL),
        kernel("ncclDevKernel_SendRecv", 40, 50),
        memcpy("Memcpy DtoH (Device -> Pageable)", 41, 42, MAIN),
        memcpy(D2D, 50, 51, MAIN),
        memcpy("Memcpy DtoD (Device Static -> Device)", 60, 61, SIDE_D2H),
        memcpy("Memcpy PtoP (Device -> Device)", 60, 61, MAIN),
        work("gpu_memset", "Memset (Device)", 52, 53),
        work("gpu_memset", "Memset (Managed)", 52, 53, NCCL),
        dict(kernel("Offload::d2h (layers.3)", 9, 32, SIDE_D2H), cat="gpu_user_annotation"),
        dict(kernel("Stream Wait Event", 9, 32), cat="cuda_sync"),
    )
    assert kinds(spans) == {
        D2H: "d2h",
        "gemm": "compute",
        "ncclDevKernel_AllGather": "other",
        "ncclDevKernel_SendRecv": "other",
        "Memcpy DtoH (Device -> Pageable)": "other",
        D2D: "compute",
        "Memcpy DtoD (Device Static -> Device)": "other",
        "Memcpy PtoP (Device -> Device)": "other",
        "Memset (Device)": "compute",
        "Memset (Managed)": "other",
    }
    assert [span.start_us for span in spans] == sorted(span.start_us for span in spans)


def test_a_span_says_where_it_comes_from(read):
    """Guards the call of a copy, which begins in the annotation and, in it, in the op that copies."""
    gemm, copy = read(
        host("user_annotation", "Offload::h2d (layers.3)", 100, 120.5),
        host("cpu_op", "aten::copy_", 103, 118),
        call("cudaMemcpyAsync", 110.25, 5),
        memcpy("Memcpy HtoD (Pageable -> Device)", 130.5, 230.75, SIDE_H2D, 5, 3 * MIB),
        kernel("gemm", 0, 40, correlation=9),
    )
    name, label = "Memcpy HtoD (Pageable -> Device)", "Offload::h2d (layers.3)"
    assert copy == Span("h2d", name, SIDE_H2D, 130.5, 230.75, 3 * MIB, label, 110.25, "aten::copy_")
    assert gemm == Span("compute", "gemm", MAIN, 0, 40)


def test_labels_are_those_around_the_call_on_its_own_thread(read):
    """The annotations of two threads overlap in time; copies run much later, in another order; the file is in none."""
    spans = read(
        call("cudaMemcpyAsync", 60, 4),
        host("user_annotation", "ProfilerStep#3", 0, 1000),
        host("user_annotation", "Offload::d2h (layers.1)", 10, 30),
        host("cpu_op", "Offload::h2d (layers.9)", 15, 40, BACKWARD),
        call("cudaMemcpyAsync", 20, 1),
        call("cudaMemcpyAsync", 20, 2, BACKWARD),
        host("user_annotation", "Offload::d2h (layers.2)", 31, 50),
        call("cuMemcpyDtoHAsync_v2", 35, 3, category="cuda_driver"),
        call("cudaMemcpyAsync", 60, 5, BACKWARD),
        memcpy(D2H, 510, 520, SIDE_D2H, 3),
        memcpy(D2H, 500, 510, SIDE_D2H, 1),
        memcpy(H2D, 501, 511, SIDE_H2D, 2),
        memcpy(D2H, 530, 540, SIDE_D2H, 4),
        memcpy(H2D, 530, 540, SIDE_H2D, 5),
    )
    assert [(span.kind, span.label, span.launched_in) for span in spans] == [
        ("d2h", "Offload::d2h (layers.1)", "Offload::d2h (layers.1)"),
        ("h2d", "Offload::h2d (layers.9)", "Offload::h2d (layers.9)"),
        ("d2h", "Offload::d2h (layers.2)", "Offload::d2h (layers.2)"),
        ("other", "", "ProfilerStep#3"),
        ("other", "", ""),
    ]


def test_a_copy_that_goes_the_other_way_is_not_the_annotated_one(read):
    (span,) = read(
        host("user_annotation", "Offload::d2h (layers.1)", 10, 30),
        call("cudaMemcpyAsync", 20, 1),
        memcpy(H2D, 500, 510, SIDE_D2H, 1),
    )
    assert (span.kind, span.label) == ("other", "")


def test_an_annotation_that_has_ended_is_around_nothing(read):
    """Ranges that overlap without being nested, as a range left in another order than it was entered."""
    spans = read(
        host("user_annotation", "Offload::d2h (layers.1)", 0, 20),
        host("user_annotation", "other", 10, 60),
        host("cpu_op", "aten::copy_", 30, 50),
        call("cudaMemcpyAsync", 15, 1),
        call("cudaMemcpyAsync", 40, 2),
        memcpy(D2H, 500, 510, SIDE_D2H, 1),
        memcpy(D2H, 511, 520, SIDE_D2H, 2),
    )
    assert [(span.kind, span.launched_in) for span in spans] == [("d2h", "other"), ("other", "aten::copy_")]


def test_the_label_is_that_of_the_innermost_annotation(read):
    spans = read(
        host("user_annotation", "Offload::d2h (outer)", 0, 100),
        host("user_annotation", "Offload::d2h (inner)", 10, 20),
        host("cpu_op", "aten::copy_", 30, 50),
        call("cudaMemcpyAsync", 15, 1),
        call("cudaMemcpyAsync", 40, 2),
        memcpy(D2H, 500, 510, SIDE_D2H, 1),
        memcpy(D2H, 511, 520, SIDE_D2H, 2),
    )
    assert [span.label for span in spans] == ["Offload::d2h (inner)", "Offload::d2h (outer)"]


def test_of_ranges_that_start_at_once_the_longer_is_around(read):
    events = (
        host("cpu_op", "aten::copy_", 10, 30),
        host("user_annotation", "Offload::d2h (layers.1)", 10, 40),
        call("cudaMemcpyAsync", 10, 1),
        memcpy(D2H, 500, 510, SIDE_D2H, 1),
    )
    (span,) = read(*events)
    assert (span.kind, span.launched_in) == ("d2h", "aten::copy_")


def test_a_driver_call_inside_a_runtime_call_is_not_the_launch(read):
    (span,) = read(
        call("cuLaunchKernel", 12, 1, category="cuda_driver"),
        call("cudaLaunchKernel", 10, 1),
        call("cuLaunchKernel", 11, 1, category="cuda_driver"),
        kernel("gemm", 20, 30, correlation=1),
    )
    assert span.launch_us == 10


def test_work_without_a_correlation_has_no_launch(read):
    event, unrelated = kernel("gemm", 20, 30), call("cudaEventRecord", 1, 0)
    del event["args"]["correlation"], unrelated["args"]["correlation"]
    (span,) = read(event, unrelated)
    assert (span.kind, span.launch_us) == ("compute", None)


def test_rows_stand_in_for_arguments(read):
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": "20.5", "dur": "9.5"}
    assert read(event) == [Span("compute", "gemm", 7, 20.5, 30.0)]


def test_a_compressed_trace_is_the_same(tmp_path):
    events = [kernel("gemm", 0.001, 40.123), memcpy(D2D, 50, 51, MAIN)]
    plain, packed = (read_spans(write(tmp_path / name, events)) for name in ("trace.json", "trace.json.gz"))
    assert plain == packed and len(plain) == 2
    assert read_spans(str(tmp_path / "trace.json.gz")) == packed


# Times and rates


def compute(start, end, **kwargs):
    return Span("compute", f"k{start}", MAIN, start, end, **kwargs)


def d2h(start, end, num_bytes=0, label="Offload::d2h (layers.1)", **kwargs):
    return Span("d2h", D2H, SIDE_D2H, start, end, num_bytes, label, **kwargs)


def h2d(start, end, num_bytes=0, label="Offload::h2d (layers.1)", **kwargs):
    return Span("h2d", H2D, SIDE_H2D, start, end, num_bytes, label, **kwargs)


def test_a_step():
    """Compute 1000 to 3000 and 4000 to 6000. Of the copies to the host 500 to 2500 and 5500 to 6500, 3000 us long,
    2000 us are hidden; of the copy back, 2500 to 4500, 1000 of 2000 us."""
    timeline = analyse(
        [
            d2h(500, 2500, 50_000_000),
            h2d(2500, 4500, 80_000_000),
            d2h(5500, 6500, 40_000_000),
            compute(4000, 6000),
            compute(1000, 2000),
            compute(2000, 3000),
            Span("other", "nccl", NCCL, 0, 9000),
        ]
    )
    assert (timeline.step_ms, timeline.compute_ms, timeline.idle_ms) == (5, 4, 1)
    assert (timeline.d2h_ms, timeline.h2d_ms) == (3, 2)
    assert (timeline.d2h_bytes, timeline.h2d_bytes) == (90_000_000, 80_000_000)
    assert (timeline.d2h_gb_per_s, timeline.h2d_gb_per_s) == (30, 40)
    assert timeline.d2h_overlap_fraction == pytest.approx(2 / 3)
    assert timeline.h2d_overlap_fraction == 0.5
    assert [(gap.start_us, gap.end_us, gap.before, gap.after) for gap in timeline.gaps] == [
        (3000, 4000, "k2000", "k4000")
    ]


def test_two_compute_streams_count_once():
    """Guards the end of a span that another one, which started later, does not reach. The copies overlap too: 60 MB in
    300 us."""
    other = Span("compute", "on the other stream", 13, 150, 700)
    timeline = analyse(
        [
            compute(100, 200),
            other,
            compute(300, 400),
            compute(900, 1000),
            d2h(0, 200, 20_000_000),
            d2h(100, 300, 40_000_000),
        ]
    )
    assert (timeline.step_ms, timeline.compute_ms, timeline.idle_ms) == (0.9, 0.7, 0.2)
    assert (timeline.d2h_ms, timeline.d2h_gb_per_s) == (0.3, 200)
    assert timeline.d2h_overlap_fraction == pytest.approx(2 / 3)
    assert [(gap.start_us, gap.end_us, gap.before) for gap in timeline.gaps] == [(700, 900, "on the other stream")]


def test_a_step_without_copies():
    timeline = analyse([compute(0, 1000)])
    assert (timeline.d2h_ms, timeline.d2h_bytes, timeline.d2h_gb_per_s, timeline.d2h_overlap_fraction) == (0, 0, 0, 0)
    assert (timeline.idle_ms, timeline.gaps) == (0, ())


SPANS = st.lists(
    st.builds(
        lambda kind, start, length: Span(kind, "", MAIN, start, start + length, 1000 * length),
        st.sampled_from(["compute", "d2h", "h2d", "other"]),
        st.integers(0, 120),
        st.integers(1, 30),
    ),
    max_size=25,
)


@given(SPANS, st.integers(0, 120), st.integers(0, 5))
def test_as_counted_microsecond_by_microsecond(spans, start, num_gaps):
    spans = [*spans, compute(start, start + 1)]
    busy, *copies = (
        {us for span in spans if span.kind == kind for us in range(span.start_us, span.end_us)}
        for kind in ("compute", "d2h", "h2d")
    )
    timeline = analyse(spans, num_gaps)
    assert timeline.step_ms == (max(busy) + 1 - min(busy)) / 1e3
    assert timeline.compute_ms == len(busy) / 1e3
    assert timeline.idle_ms == (max(busy) + 1 - min(busy) - len(busy)) / 1e3
    for direction, of_direction in zip(("d2h", "h2d"), copies, strict=True):
        assert getattr(timeline, f"{direction}_ms") == len(of_direction) / 1e3
        hidden = len(of_direction & busy) / len(of_direction) if of_direction else 0
        assert getattr(timeline, f"{direction}_overlap_fraction") == hidden
    edges = sorted(busy)
    gaps = [(a + 1, b) for a, b in itertools.pairwise(edges) if b - a - 1 >= 2]
    gaps.sort(key=lambda gap: gap[0] - gap[1])
    assert [(gap.start_us, gap.end_us) for gap in timeline.gaps] == gaps[:num_gaps]


# Causes. The gap is from 1000 to 2000.


def cause(*spans, launch=900, launched_in="aten::mm"):
    (gap,) = analyse([compute(0, 1000), compute(2000, 3000, launch_us=launch, launched_in=launched_in), *spans]).gaps
    return gap.cause


def test_a_late_launch():
    assert cause(launch=1990) == "host: launched late, in aten::mm"
    assert cause(launch=1990, launched_in="") == "host: launched late"
    assert cause(launch=1001) == cause(launch=900) == cause(launch=None) == "unknown"


def test_a_slow_launch():
    """The call itself may take long: a kernel's code is loaded when it is launched first."""
    assert cause(launch=1500) == "host: launched late, in aten::mm"


def test_a_reload():
    assert cause(h2d(500, 1995)) == "reload: waits for Offload::h2d (layers.1)"
    assert cause(h2d(500, 2000.5)) == "reload: waits for Offload::h2d (layers.1)"  # clocks of two engines
    assert cause(h2d(500, 1950)) == cause(h2d(500, 2050)) == cause(h2d(1980, 2050)) == "unknown"


def test_an_offload():
    assert cause(d2h(500, 1995)) == "offload: waits for Offload::d2h (layers.1)"


def test_another_stream():
    nccl = Span("other", "ncclDevKernel_AllGather", NCCL, 500, 1995)
    assert cause(nccl) == "other stream: ncclDevKernel_AllGather"
    assert cause(Span("other", D2H, MAIN, 1001, 1999)) == f"same stream: {D2H}"


def test_a_launch_shortly_before_the_end_is_the_cause_whatever_else_ended():
    assert cause(h2d(500, 1995), launch=1985) == "host: launched late, in aten::mm"


def test_a_launch_that_had_long_been_made_when_a_copy_ended_is_not_the_cause():
    assert cause(h2d(500, 1995), launch=1100) == "reload: waits for Offload::h2d (layers.1)"
    assert cause(d2h(500, 1995), launch=1100) == "offload: waits for Offload::d2h (layers.1)"


def test_ours_come_before_others_and_reloads_before_offloads():
    nccl = Span("other", "nccl", NCCL, 500, 1999)
    assert cause(nccl, d2h(500, 1995), h2d(500, 1990)) == "reload: waits for Offload::h2d (layers.1)"
    assert cause(nccl, d2h(500, 1995)) == "offload: waits for Offload::d2h (layers.1)"


def test_the_last_of_several_to_end_is_the_cause():
    copies = [h2d(500 + i, 1990 + i, label=f"Offload::h2d (layers.{i})") for i in (1, 3, 2)]
    assert cause(*copies) == "reload: waits for Offload::h2d (layers.3)"


def test_a_kernel_cannot_wait_for_a_copy_that_the_host_started_later():
    early, late = h2d(500, 1990, label="Offload::h2d (early)", launch_us=400), h2d(1000, 1995, launch_us=950)
    assert cause(early, late) == "reload: waits for Offload::h2d (early)"
    assert cause(late) == "unknown"
    assert cause(late, launch=None) == "reload: waits for Offload::h2d (layers.1)"


def test_a_copy_that_ended_before_a_short_gap_is_not_its_cause():
    spans = [compute(0, 1000), compute(1008, 2000), h2d(0, 1000)]
    assert [gap.cause for gap in analyse(spans).gaps] == ["unknown"]
    assert NEAR_US > 8
    spans[2] = h2d(0, 1004)
    assert [gap.cause for gap in analyse(spans).gaps] == ["reload: waits for Offload::h2d (layers.1)"]


def test_the_largest_gaps_come_first_and_launch_overhead_is_none():
    ends = {0: 90, 100: 200, 250: 350, 351.5: 451.5, 500: 600, 602: 611}
    spans = [compute(start, end) for start, end in ends.items()]
    assert [(gap.start_us, gap.end_us) for gap in analyse(spans).gaps] == [
        (200, 250),
        (451.5, 500),
        (90, 100),
        (600, 602),
    ]
    assert [gap.start_us for gap in analyse(spans, num_gaps=2).gaps] == [200, 451.5]


def test_causes_from_a_file(read):
    """A backward that waits for its reload, then for the host: from the file to the cause."""
    timeline = analyse(
        read(
            host("cpu_op", "aten::mm", 0, 9, BACKWARD),
            call("cudaLaunchKernel", 1, 1, BACKWARD),
            kernel("gemm_a", 10, 1000, correlation=1),
            host("user_annotation", "Offload::h2d (layers.3)", 10, 30, BACKWARD),
            call("cudaMemcpyAsync", 15, 2, BACKWARD),
            memcpy(H2D, 50, 1500, SIDE_H2D, 2, 58_000_000),
            host("cpu_op", "aten::add", 31, 40, BACKWARD),
            call("cudaLaunchKernel", 35, 3, BACKWARD),
            kernel("add", 1508, 2000, correlation=3),
            host("user_annotation", "Optimizer.step#AdamW.step", 2300, 2400),
            call("cudaLaunchKernel", 2310, 4),
            kernel("adamw", 2316, 2500, correlation=4),
        )
    )
    assert [(gap.before, gap.after, gap.cause) for gap in timeline.gaps] == [
        ("gemm_a", "add", "reload: waits for Offload::h2d (layers.3)"),
        ("add", "adamw", "host: launched late, in Optimizer.step#AdamW.step"),
    ]
    assert timeline.h2d_gb_per_s == 40
    assert timeline.h2d_overlap_fraction == pytest.approx(950 / 1450)


# What is no step


def test_a_trace_without_device_work_is_refused(read):
    with pytest.raises(ValueError, match="holds no work of a device"):
        read()
    with pytest.raises(ValueError, match=r"ProfilerActivity\.CUDA"):
        read(host("cpu_op", "aten::mm", 0, 10), call("cudaDeviceSynchronize", 1, 1))


def test_a_step_without_compute_is_refused():
    with pytest.raises(ValueError, match=r"no span of kind compute among the spans \(none at all\)"):
        analyse([])
    with pytest.raises(ValueError, match=r"no span of kind compute among the spans \(2 d2h, 1 other\)"):
        analyse([d2h(0, 1), Span("other", "nccl", NCCL, 0, 1), d2h(1, 2)])


def test_work_of_two_devices_is_refused(read):
    event = kernel("gemm", 0, 1)
    event["args"]["device"] = 1
    with pytest.raises(ValueError, match="work of devices 0, 1"):
        read(kernel("gemm", 0, 1), event)


@pytest.mark.parametrize("content", [b"", b'{"traceEvents": [', b"[]", b'{"traceEvents": 1}'])
def test_what_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"trace\.json is no trace"):
        read_spans(path)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=r"trace\.json\.gz is no trace"):
        read_spans(path)


def test_half_a_compressed_trace_is_refused(tmp_path):
    path = write(tmp_path / "trace.json.gz", [kernel("gemm", i, i + 1) for i in range(100)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="is no trace"):
        read_spans(path)


# Size


def test_300_000_spans_take_seconds():
    """Guards also many gaps, and many copies that end in a gap's reach."""
    rng = random.Random(0)
    spans = [compute(10 * i, 10 * i + rng.choice((5, 10)), launch_us=10 * i - 50) for i in range(150_000)]
    spans += [h2d(10 * i, 10 * i + rng.randrange(1, 40), launch_us=1e9) for i in range(75_000)]
    spans += [d2h(10 * i, 1_499_990, launch_us=1e9) for i in range(75_000)]
    rng.shuffle(spans)
    start = time.process_time()
    timeline = analyse(spans, num_gaps=1000)
    assert time.process_time() - start < 10
    assert len(timeline.gaps) == 1000


def test_a_large_file_takes_seconds(tmp_path):
    num = 50_000
    events = [host("user_annotation", "ProfilerStep#3", 0, 1e9)]
    for i in range(num):
        events += [host("cpu_op", "aten::mm", 10 * i, 10 * i + 9), call("cudaLaunchKernel", 10 * i + 1, i)]
        events.append(kernel("gemm", 10 * i + 100, 10 * i + 110, correlation=i))
    path = write(tmp_path / "trace.json", events)
    start = time.process_time()
    spans = read_spans(path)
    assert time.process_time() - start < 10
    assert len(spans) == num
    assert {span.launched_in for span in spans} == {"aten::mm"}


# What the profiler writes


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory):
    """Of a step of the toy model, offloaded. A profile can be exported once only."""
    model, tokens = make_model(), make_tokens()
    offloader = offload(model, schedule="sync")  # which reloads there are depends on no time
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model.loss(tokens).backward()
    offloader.remove()
    path = tmp_path_factory.mktemp("trace") / "cpu.json.gz"
    profiler.export_chrome_trace(str(path))
    return path


def test_a_profile_of_a_cpu_is_refused(cpu_trace, tmp_path):
    plain = tmp_path / "cpu.json"
    plain.write_bytes(gzip.decompress(cpu_trace.read_bytes()))
    for path in (cpu_trace, plain):
        with pytest.raises(ValueError, match="holds no work of a device"):
            read_spans(path)


def test_the_engine_annotates_its_copies_so_that_they_are_found(cpu_trace, read):
    """The host's events are the profiler's own; the device's, and the calls in the midst of the annotations, are added:
    what a device would have added."""
    events = json.loads(gzip.decompress(cpu_trace.read_bytes()))["traceEvents"]
    ours = [event for event in events if event["name"].startswith(LABELS)]
    for i, event in enumerate(ours):
        name = D2H if "d2h" in event["name"] else H2D
        middle = event["ts"] + event["dur"] / 2
        events += [
            call("cudaMemcpyAsync", middle, i, event["tid"], length=0.1),
            memcpy(name, middle, middle + 9, 20, i),
        ]
    spans = read(*events)
    forward, backward = ([f"Offload::{way} (layers.{i})" for i in range(5)] for way in ("d2h", "h2d"))
    assert [span.label for span in spans] == [*forward, *reversed(backward)]
    assert [span.kind for span in spans] == ["d2h"] * 5 + ["h2d"] * 5
