"use strict";
// The formulas of a plan: those of costs.py, simulation.py, link_choice.py, steps.py and planner.py, where each has its
// source. Times in milliseconds, sizes in bytes. The same names as there; tests/test_plan_page.py holds both to the same
// figures. What does not follow from the page's controls (the order of a pipeline's schedule, which blocks a stage has)
// comes from there as data.

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const largest = (numbers) => numbers.reduce((most, number) => Math.max(most, number), 0);
const range = (start, end) => Array.from({ length: Math.max(0, end - start) }, (_, index) => start + index);


// costs.py

const copyMs = (numBytes, gbPerS, devicesPerLink) => numBytes / (gbPerS / devicesPerLink * 1e6);

const flopMs = (flop, machine) => flop / (machine.tflops * 1e9);

function matmulFlop(layer, job) {
  return 2 * job.batch * job.seq_len * layer.params / (job.context_parallel * job.tensor_parallel);
}

function attentionFlop(layer, job) {
  const seq = job.seq_len, window = Math.min(layer.window ?? seq, seq);
  const pairs = seq * window - window ** 2 / 2;
  const widths = layer.attention_width + layer.output_width;
  return 2 * job.batch * pairs * widths / (job.context_parallel * job.tensor_parallel);
}

const tokensOf = (job) => job.batch * Math.ceil(job.seq_len / job.context_parallel);

function inputBytes(model, job) {
  return job.batch * Math.ceil(job.seq_len / (job.context_parallel * job.tensor_parallel)) * model.dim * job.itemsize;
}

function savedSizes(layer, job) {
  const tokens = tokensOf(job), heads = Math.ceil(layer.num_heads / job.tensor_parallel);
  const headDim = Math.floor(layer.output_width / layer.num_heads);
  const attention = layer.saves_attention ? [tokens * heads * headDim * job.itemsize, tokens * heads * 4] : [];
  return [...attention, ...layer.other_saves.map((perToken) => tokens * perToken)];
}

function activationSizes(layer, { model, job, constants }) {
  if (job.is_checkpointed || !layer.activations.length) return [constants.all_over_input * inputBytes(model, job)];
  return layer.activations.map((perToken) => Math.round(tokensOf(job) * perToken));
}

function stemBytes(job, constants) {
  const size = tokensOf(job) * 8, isHalf = job.pipeline_parallel > 1 && job.num_forwards === 2;
  return size < constants.min_offload_bytes ? 0 : size * (isHalf ? 2 : 1);
}

function blockCosts(layer, { model, job, machine, offload, constants }, variant) {
  const attentionMs = flopMs(attentionFlop(layer, job), machine);
  const forwardMs = flopMs(matmulFlop(layer, job), machine) + attentionMs;
  const size = inputBytes(model, job), activations = activationSizes(layer, { model, job, constants });
  const moves = (sizes) => sizes.filter((bytes) => bytes >= constants.min_offload_bytes);
  const costs = (backwardMs, inputs, saves, staysBytes, recomputedBytes) => {
    const movedBytes = sum(inputs) + sum(saves);
    const d2hMs = copyMs(movedBytes, machine.d2h_gb_per_s, machine.devices_per_link);
    const h2dMs = copyMs(movedBytes, machine.h2d_gb_per_s, machine.devices_per_link);
    return { forwardMs, attentionMs, backwardMs, inputs, saves, staysBytes, recomputedBytes, movedBytes, d2hMs, h2dMs };
  };
  if (variant === "all_without_ac") {
    const moving = moves(activations);
    return costs(2 * forwardMs, moving, [], sum(activations) - sum(moving), 0);
  }
  const isSelective = variant.startsWith("overlap_selective");
  const saved = isSelective ? savedSizes(layer, job) : [];
  const backwardMs = 3 * forwardMs - (isSelective && layer.saves_attention ? attentionMs : 0);
  const inputs = moves(variant === "ac" || offload.mode === "none" ? [] : [size]);
  const saves = moves(variant === "overlap_selective_host" ? saved : []);
  return costs(backwardMs, inputs, saves, size + sum(saved) - sum(inputs) - sum(saves), sum(activations));
}

const sharedAmong = (job) => Math.floor(job.num_devices / job.data_parallel_replicate);

function logitsBytes(model, job, constants) {
  return Math.ceil(tokensOf(job) * (model.vocab_size ?? 0) * (job.itemsize + constants.loss_bytes) / job.tensor_parallel);
}

function unshardedBytes(model, job, constants) {
  if (model.num_params === null || sharedAmong(job) === job.tensor_parallel * job.pipeline_parallel) return 0;
  const bytes = constants.unsharded_blocks * model.num_params * job.itemsize;
  return Math.floor(bytes / (model.num_layers * job.tensor_parallel));
}


// simulation.py: one forward pass and its backward by the engine's rules. ``times``: of each block,
// and of a backward alone in forwards.

function simulateStep(times, rules) {
  const clock = new Clock(times, rules.numMoved, rules.keepsIntervals);
  if (rules.schedule === "sync") {
    clock.runSync();
    return clock;
  }
  const numArrived = rules.numArrived ?? times.forward.map(() => 0);
  clock.runForward(rules.numArrived ? 0 : rules.maxInflightOffloads, numArrived);
  if (rules.isBackwardLater) clock.letCopiesEnd();
  const resident = new Set(rules.reloadsAll ? [] : clock.stash);
  clock.numResident = resident.size;
  clock.runBackward(rules.prefetchLookahead, resident);
  return clock;
}

class Clock {
  constructor(times, numMoved, keepsIntervals = false) {
    Object.assign(this, times, { numMoved, keepsIntervals, now: 0, numResident: 0, onHost: [], stash: [], intervals: [] });
  }

  runForward(maxInflightOffloads, numArrived) {
    let d2hFree = 0;
    for (const k of this.forward.keys()) {
      while (this.stash.length && this.stash[0] < numArrived[k]) this.dropOldest();
      this.reap();
      if (k < this.numMoved) {
        while (maxInflightOffloads && this.stash.length >= maxInflightOffloads) this.dropOldest();
        d2hFree = this.run("d2h", `offload ${k}`, Math.max(d2hFree, this.now), this.d2h[k]);
        this.onHost.push(d2hFree);
        this.stash.push(k);
      }
      this.runForwardOf(k);
    }
    this.reap();
  }

  runBackward(prefetchLookahead, resident) {
    let h2dFree = 0;
    const ready = new Map();  // when the copy back ends
    for (const k of [...this.forward.keys()].reverse()) {
      for (let j = k; j >= Math.max(0, k - prefetchLookahead); j--) {
        if (j >= this.numMoved || resident.has(j) || ready.has(j)) continue;
        h2dFree = this.run("h2d", `reload ${j}`, Math.max(h2dFree, this.now, this.onHost[j]), this.h2d[j]);
        ready.set(j, h2dFree);
      }
      this.now += Math.max(0, (ready.get(k) ?? this.now) - this.now);
      this.runBackwardOf(k);
    }
  }

  runSync() {
    for (const k of this.forward.keys()) {
      if (k < this.numMoved) this.now = this.run("d2h", `offload ${k}`, this.now, this.d2h[k]);
      this.runForwardOf(k);
    }
    for (const k of [...this.forward.keys()].reverse()) {
      if (k < this.numMoved) this.now = this.run("h2d", `reload ${k}`, this.now, this.h2d[k]);
      this.runBackwardOf(k);
    }
  }

  letCopiesEnd() {
    this.stash = [];
    this.onHost = this.onHost.map((end) => Math.min(end, this.now));
  }

  runForwardOf(k) {
    this.now = this.run("compute", `forward ${k}`, this.now, this.forward[k]);
  }

  runBackwardOf(k) {
    const recompute = Math.max(0, this.backward[k] - this.gradients * this.forward[k]);
    const start = this.now;
    this.now += this.backward[k];
    if (recompute) this.run("compute", `recompute ${k}`, start, recompute);
    this.run("compute", `backward ${k}`, start + recompute, this.now - start - recompute);
  }

  reap() {
    while (this.stash.length && this.onHost[this.stash[0]] <= this.now) this.stash.shift();
  }

  dropOldest() {
    this.now += Math.max(0, this.onHost[this.stash.shift()] - this.now);
  }

  run(lane, name, start_ms, duration) {
    if (this.keepsIntervals) this.intervals.push({ lane, name, start_ms, end_ms: start_ms + duration });
    return start_ms + duration;
  }
}

const syncSlowdown = (d2h, h2d, backward) => (d2h + h2d) / (1 + backward);

function overlapSlowdown(d2h, h2d, backward, maxInflightOffloads) {
  const out = maxInflightOffloads ? Math.max(0, d2h - 1) : 0;
  return (out + Math.max(0, h2d - backward)) / (1 + backward);
}


// link_choice.py: with limit = "link", the most blocks whose copies hide.

function chooseLinkLimit(costs, { offload, machine, constants }) {
  const forward = costs.map((cost) => cost.forwardMs / 1e3);
  const backward = forward.map((time) => constants.backward * time);
  const copies = (rate) => costs.map((cost) => cost.movedBytes / (rate / machine.devices_per_link * 1e9));
  const times = { gradients: constants.gradients, forward, backward, d2h: copies(machine.d2h_gb_per_s), h2d: copies(machine.h2d_gb_per_s) };
  const total = sum(forward), longest = (1 + constants.tolerance) * (1 + constants.backward) * total;
  let clock, numMoved = Math.max(0, forward.length - offload.keep_last);
  for (; numMoved >= 0; numMoved--) {
    clock = new Clock(times, numMoved);
    clock.runForward(0, forward.map(() => 0));
    const isOut = largest(clock.onHost) <= total * (1 + constants.rounding);
    clock.runBackward(offload.prefetch_lookahead, new Set());
    if (isOut && clock.now <= longest) break;
  }
  let now = 0;
  const starts = [-Infinity, ...forward.slice(0, -1).map((time) => (now += time) - time)];
  return { numMoved, numArrived: starts.map((start) => clock.onHost.filter((end) => end <= start).length) };
}


// pipeline.py: of what each pass of a rank's stages leaves behind, the most that is there at once.

function mostInFlight(job, { alive, passes }, weights) {
  if (alive) return largest(alive.map((counts) => sum(counts.map((count, stage) => count * weights[stage]))));
  return Math.min(passes * largest(weights), job.num_forwards * sum(weights));
}


// steps.py: one way to run a step, on all ranks. ``question`` is what was asked, see `ask`.

const slotsBytes = (bytes) => Math.ceil(bytes / 512) * 512;

class Way {
  constructor(question, variant) {
    Object.assign(this, question, { variant });
    this.movesAll = variant === "all_without_ac";
    if (variant !== this.planned) {
      const limit = this.movesAll ? "memory" : this.offload.limit;
      this.offload = { ...this.offload, mode: this.movesAll ? "all" : "block_inputs", limit };
    }
    const isPlanned = variant === this.planned && variant !== "ac";
    this.schedule = isPlanned ? this.offload.schedule : variant === "sync" ? "sync" : "overlap";
    this.runs = this.model.layers.map((layer) => blockCosts(layer, this, variant));
    this.blocks = this.model.layers.flatMap((layer, index) => Array(layer.count).fill(this.runs[index]));
    this.ranks = this.pipeline.map((rank) => this.partsOf(rank));
  }

  partsOf(rank) {
    return rank.stages.map((stage) => {
      const [first, end] = this.model.stages[stage];
      return { first, costs: this.blocks.slice(first, end), isBackwardLater: rank.passes > 1 };
    });
  }

  // One pass and its backward: {stepMs, numMoved, numResident}.
  stepOf(part) {
    part.step ??= this.simulate(part, part.isBackwardLater);
    return part.step;
  }

  boundMs(part) {
    const { numResident, stepMs } = this.stepOf(part);
    return numResident ? this.simulate(part, false, true).stepMs : stepMs;
  }

  simulate({ costs }, isBackwardLater, reloadsAll = false) {
    const { offload } = this;
    const isLimited = offload.limit === "link" && this.schedule === "overlap" && this.variant !== "ac";
    const link = isLimited ? chooseLinkLimit(costs, this) : null;
    const most = this.variant === "ac" ? 0 : Math.max(0, costs.length - offload.keep_last);
    const numMoved = link ? Math.min(link.numMoved, most) : most;
    const step = simulateStep(timesOf(costs, this.constants), {
      schedule: this.schedule, numMoved, prefetchLookahead: offload.prefetch_lookahead,
      maxInflightOffloads: offload.max_inflight_offloads, numArrived: link?.numArrived, isBackwardLater, reloadsAll,
    });
    return { stepMs: step.now, numResident: step.numResident, numMoved };
  }

  // Time

  stepMs(timeOf) {
    return (this.job.num_forwards + this.bubble) * largest(this.ranks.map((parts) => sum(parts.map(timeOf))));
  }

  closedFormPercent(maxInflightOffloads) {
    let over = 0, total = 0;
    for (const cost of this.blocks) {
      const [d2h, h2d, backward] = [cost.d2hMs, cost.h2dMs, cost.backwardMs].map((time) => time / cost.forwardMs);
      const slowdown = this.schedule === "sync" ? syncSlowdown(d2h, h2d, backward)
        : overlapSlowdown(d2h, h2d, backward, maxInflightOffloads);
      over += slowdown * (cost.forwardMs + cost.backwardMs);
      total += cost.forwardMs + cost.backwardMs;
    }
    return over / total * 100;
  }

  // Host memory

  pinnedBytes(rank) {
    const parts = this.ranks[rank];
    const counts = new Map();  // by kind and size: of each stage
    parts.forEach((part, stage) => {
      for (const cost of part.costs.slice(0, Math.max(0, part.costs.length - this.offload.keep_last)))
        for (const slot of [...cost.inputs.map((size) => `input ${size}`), ...cost.saves.map((size) => `save ${size}`)]) {
          if (!counts.has(slot)) counts.set(slot, parts.map(() => 0));
          counts.get(slot)[stage] += 1;
        }
    });
    const first = parts.findIndex((part) => part.first === 0);
    if (this.stemBytes() && first >= 0) {
      const slot = `input ${this.stemBytes()}`;
      if (!counts.has(slot)) counts.set(slot, parts.map(() => 0));
      counts.get(slot)[first] += 1;
    }
    return sum([...counts].map(([slot, byStage]) =>
      slotsBytes(Number(slot.split(" ")[1])) * mostInFlight(this.job, this.pipeline[rank], byStage)));
  }

  stemBytes() {
    return this.offload.mode === "all" && this.variant !== "ac" ? stemBytes(this.job, this.constants) : 0;
  }

  pinnedNodeBytes() {
    return this.mostOfANode(this.ranks.map((_, rank) => this.pinnedBytes(rank)));
  }

  mostOfANode(ofPipelineRanks) {
    return largest(this.nodes.map((counts) => sum(counts.map((count, rank) => count * ofPipelineRanks[rank]))));
  }

  // Device memory

  partHeld(part, isLastPass = true) {
    const { numMoved, numResident } = this.stepOf(part);
    const first = isLastPass ? numMoved - numResident : numMoved;
    return sum(part.costs.map((cost) => cost.staysBytes)) + sum(part.costs.slice(first).map((cost) => cost.movedBytes));
  }

  heldByOthers(rank, stage) {
    const held = this.ranks[rank].map((part) => this.partHeld(part, false));
    return Math.max(0, mostInFlight(this.job, this.pipeline[rank], held) - held[stage]);
  }

  heldBytes(rank) {
    return largest(this.ranks[rank].map((part, stage) => this.heldByOthers(rank, stage) + this.partHeld(part)));
  }

  peak() {
    let peak = { name: "", num_bytes: -1 };
    this.ranks.forEach((parts, rank) => parts.forEach((part, stage) => {
      for (const moment of this.moments(part, this.heldByOthers(rank, stage)))
        if (moment.num_bytes > peak.num_bytes) peak = moment;
    }));
    return peak;
  }

  * moments(part, others) {
    const { model, job, constants } = this, num = part.costs.length;
    const ahead = this.schedule === "sync" ? 0 : this.offload.prefetch_lookahead;
    const lookahead = this.movesAll ? Math.max(0, ahead - 1) : ahead;
    const gradients = Math.floor(constants.gradient_bytes * (model.num_params ?? 0) / sharedAmong(job));
    const hasAll = job.num_forwards > 1, { numMoved, numResident } = this.stepOf(part);
    const logits = part.first + num === model.num_layers ? logitsBytes(model, job, constants) : 0;
    yield this.moment("end of forward", others + this.partHeld(part), { logits, gradients: hasAll ? gradients : 0 });
    for (const k of range(0, num)) {
      const done = hasAll ? 1 : (num - 1 - k) / num;
      const first = Math.max(0, Math.min(numMoved - numResident, k - lookahead));
      const held = sum(part.costs.slice(0, k + 1).map((cost) => cost.staysBytes))
        + sum(part.costs.slice(first, k + 1).map((cost) => cost.movedBytes));
      yield this.moment(`backward of block ${part.first + k}`, others + held, {
        recomputed: part.costs[k].recomputedBytes, gradients: Math.trunc(gradients * done) });
    }
  }

  moment(name, held, { recomputed = 0, logits = 0, gradients = 0 }) {
    const { model, job, constants } = this;
    const parts_bytes = {
      [this.movesAll ? "activations" : "block inputs and saved outputs"]: held,
      "one block's recompute": recomputed,
      "logits": logits,
      "gradients": gradients,
      "parameters and optimizer states": Math.floor(constants.state_bytes * (model.num_params ?? 0) / sharedAmong(job)),
      "unsharded parameters": unshardedBytes(model, job, constants),
    };
    for (const [what, bytes] of Object.entries(parts_bytes)) if (!bytes) delete parts_bytes[what];
    return { name, num_bytes: sum(Object.values(parts_bytes)), parts_bytes };
  }

  // All of it

  cost(acStepMs) {
    const { variant, constants } = this;
    const compute_ms = this.stepMs((part) => sum(part.costs.map((cost) => cost.forwardMs + cost.backwardMs)));
    let step_ms = this.stepMs((part) => this.stepOf(part).stepMs);
    if (step_ms <= compute_ms * (1 + constants.rounding)) step_ms = compute_ms;
    const moved = this.ranks.map((parts) => sum(parts.map(
      (part) => sum(part.costs.slice(0, this.stepOf(part).numMoved).map((cost) => cost.movedBytes))
        + (part.first === 0 ? this.stemBytes() : 0))));
    return {
      variant, step_ms,
      step_bound_ms: Math.max(step_ms, this.stepMs((part) => this.boundMs(part))),
      compute_ms,
      simulated_percent: (step_ms / compute_ms - 1) * 100,
      closed_form_unlimited_percent: this.closedFormPercent(0),
      closed_form_limited_percent: this.closedFormPercent(1),
      vs_ac_percent: (step_ms / (acStepMs || step_ms) - 1) * 100,
      d2h_ms: largest(this.blocks.map((cost) => cost.d2hMs)),
      h2d_ms: largest(this.blocks.map((cost) => cost.h2dMs)),
      moved_bytes: this.job.num_forwards * largest(moved),
      held_bytes: largest(this.ranks.map((_, rank) => this.heldBytes(rank))),
      peak: this.peak(),
      pinned_bytes: largest(this.ranks.map((_, rank) => this.pinnedBytes(rank))),
      pinned_node_bytes: this.pinnedNodeBytes(),
    };
  }
}

const timesOf = (costs, constants) => ({
  gradients: constants.gradients,
  forward: costs.map((cost) => cost.forwardMs), backward: costs.map((cost) => cost.backwardMs),
  d2h: costs.map((cost) => cost.d2hMs), h2d: costs.map((cost) => cost.h2dMs),
});


// planner.py

// What is asked: the page's data, with a setting of its controls:
// {model: index, seq_len, d2h_gb_per_s, h2d_gb_per_s, devices_per_link}.
function ask(data, { model, seq_len, ...link }) {
  return {
    ...data, model: data.models[model], job: { ...data.job, seq_len }, machine: { ...data.machine, ...link },
    planned: data.variant,
  };
}

// The same keys as `Plan.to_json`, as far as the page has use for them.
function makePlan(data, setting) {
  const question = ask(data, setting);
  const ways = Object.fromEntries(data.variants.map((variant) => [variant, new Way(question, variant)]));
  const acCost = ways.ac.cost();
  const steps = Object.fromEntries(data.variants.map((variant) => [variant, ways[variant].cost(acCost.step_ms)]));
  const inputRanks = ways.ac.ranks.map((_, rank) => ways.ac.heldBytes(rank));
  const pictured = ways[data.variant === "all_without_ac" ? data.variant : "overlap"];
  const timelines = Object.fromEntries(["sync", "overlap"].map(
    (schedule) => [schedule, timeline(pictured, schedule, data.timeline_blocks)]));
  const memory = {
    block_inputs_bytes: largest(inputRanks),
    block_inputs_node_bytes: ways.ac.mostOfANode(inputRanks),
    pinned_bytes: steps[data.variant].pinned_bytes,
    pinned_node_bytes: steps[data.variant].pinned_node_bytes,
    host_budget_bytes: data.host_budget_bytes,
  };
  const { name, dim, num_layers } = question.model;
  const layers = layerTimes(question, ways[data.variant]);
  return { model: { name, dim, num_layers }, layers, steps, memory, longest: longestOf(question), timelines };
}

function layerTimes(question, way) {
  const { model, job, machine } = question;
  const input_bytes = inputBytes(model, job);
  let first = 0;
  return model.layers.map((layer, index) => {
    const { forwardMs: forward_ms, attentionMs: attention_ms, movedBytes } = way.runs[index];
    const moved = way.movesAll ? movedBytes : input_bytes;
    const d2h_ms = copyMs(moved, machine.d2h_gb_per_s, machine.devices_per_link);
    const h2d_ms = copyMs(moved, machine.h2d_gb_per_s, machine.devices_per_link);
    const saved_bytes = sum(way.movesAll ? activationSizes(layer, question) : savedSizes(layer, job));
    first += layer.count;
    return {
      first: first - layer.count, count: layer.count, forward_ms, attention_ms, d2h_ms, h2d_ms,
      copy_over_forward: Math.max(d2h_ms, h2d_ms) / forward_ms, input_bytes, saved_bytes,
    };
  });
}

function longestOf(question) {
  const multiple = question.multiple, host = question.host_budget_bytes;
  const device = question.machine.device_memory_gib;
  const at = (seq_len, variant) => new Way({ ...question, job: { ...question.job, seq_len } }, variant);
  const deviceFits = (variant) => (seq_len) => at(seq_len, variant).peak().num_bytes <= device * 2 ** 30;
  return {
    multiple,
    host: host === null ? null
      : largestThat((seq_len) => at(seq_len, question.planned).pinnedNodeBytes() <= host, multiple),
    device_ac: device === null ? null : largestThat(deviceFits("ac"), multiple),
    device: device === null ? null : largestThat(deviceFits(question.planned), multiple),
  };
}

function largestThat(fits, multiple) {
  let low = 0, high = 1;
  while (fits(high * multiple)) {
    [low, high] = [high, high * 2];
    if (high * multiple > 2 ** 40) return null;
  }
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle * multiple)) low = middle;
    else high = middle;
  }
  return low * multiple;
}

function timeline(way, schedule, numBlocks) {
  const blocks = way.blocks.slice(0, numBlocks), { offload } = way;
  return simulateStep(timesOf(blocks, way.constants), {
    schedule, numMoved: blocks.length - Math.min(offload.keep_last, blocks.length - 1),
    prefetchLookahead: offload.prefetch_lookahead, maxInflightOffloads: offload.max_inflight_offloads,
    keepsIntervals: true,
  }).intervals;
}
