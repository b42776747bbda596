"""Are the sentences of `why`, of the report and of its advice true of what was recorded?

    python bench/true_sentences.py --json [--quick] [--only NAME ...] [--runs FOLDER ...]

Loops of bench/loops are recorded on one and two ranks: plain PyTorch, accelerate, the Trainer of
Transformers, Lightning, FSDP2, torch.compile, Hogwild, a small GPT. Each sentence of their verdicts
and each proposal is matched with a pattern, and each number in it compared with what
`true_facts.py` counts in the traces. That shares no code with `paceline.report`. The page, the
terminal and both JSON objects must have the same sentences. A sentence that no pattern knows is
listed as not judged. `--runs` judges runs that were recorded before.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import real_scripts
from harness import Report, options, tell
from true_facts import RunFacts

from paceline.trace.format.events import Kind

ALONE = ("evaluation", "accumulation", "gan", "marked", "no_optimizer", "by_hand", "compiled_step")
ALONE_FRAMEWORKS = ("trainer_gpt2", "accelerate", "lightning")
PROJECTS = ("hogwild", "tiny_gpt", "workers", "logs", "uneven", "blocks")
QUICK = (("ddp", 2), ("evaluation", 2), ("compiled_step", 1))
STEPS = 60
RUNS = 40
S = r"([\d.,]+) (s|ms|µs|ns)"
SHARE = r"(< 0\.1|[\d.]+) %"
PART = rf"(?:all {S}|([\d.]+) of {S}|up to {S})"
DOING = {
    "waiting for data": ("input",),
    "copies to and from the device": ("copy",),
    "compiling the model": ("compilation",),
    "the forward pass": ("forward",),
    "the backward pass": ("backward",),
    "the optimizer": ("optimizer",),
    "communication": ("blocked",),
    "waiting for other ranks": ("blocked",),
    "checkpoints": ("checkpoint",),
    "evaluation": ("evaluation", "input", "copy", "named"),
    "the script's own work between phases": None,  # what samples name is not counted here
    "the rest of the loop": None,
}
LOOSE = 0.01  # of the loop, by which shares may differ: they are rounded


def seconds(number, unit):
    return float(number.replace(",", "")) / {"s": 1, "ms": 1e3, "µs": 1e6, "ns": 1e9}[unit]


def share(text):
    return 0.0 if text.startswith("<") else float(text) / 100


def near(found, expected, relative=0.05, absolute=2e-5):
    return abs(found - expected) <= max(relative * abs(expected), absolute)


# --- what sentences say ---------------------------------------------------------------------------


def steps_are(facts, match, group=1):
    if int(match[group].replace(",", "")) != facts.steps:
        yield f"{match[group]} steps, of {facts.steps}"


def spent_is(facts, match, names, shares, without=()):
    """Check that shares of a mean step are those of the trace, and that none is larger."""
    rest = 1 - sum(facts.mean_share(phase) for phase in without)
    for name, said in zip(names, shares, strict=True):
        phases = DOING[name]
        if phases is None:
            continue
        own = facts.mean_share(phases[0]) / rest
        most = sum(facts.mean_share(phase) for phase in phases) / rest
        part = name in ("communication", "waiting for other ranks")  # of what is blocked
        least = 0.0 if part else own
        if not least - LOOSE <= share(said) <= most + LOOSE:
            yield f"{name} is {said} %, counted {100 * own:.1f} to {100 * most:.1f} %"
    first = share(shares[0])
    if facts.mean_share("evaluation"):  # takes input and copies in
        return
    for name in ("input", "forward", "backward", "optimizer", "checkpoint"):
        known = {phase for said in names for phase in DOING[said] or ()}
        if name not in known and name not in without:
            larger = facts.mean_share(name) / rest
            if larger > first + LOOSE:
                yield f"{name} is larger: {100 * larger:.1f} %"


def even(facts, match):
    yield from steps_are(facts, match)
    yield from spent_is(facts, match, (match[2], match[4]), (match[3], match[5]))


def compiled(facts, match):
    own = facts.mean_share("compilation")
    if abs(share(match[1]) - own) > LOOSE:
        yield f"compiling is {match[1]} %, counted {100 * own:.1f} %"
    names, shares = (match[2], match[4]), (match[3], match[5])
    yield from spent_is(facts, match, names, shares, ("compilation",))


def they_wait(facts, match):
    blocked = facts.mean_share("blocked")
    if share(match[1]) > blocked + LOOSE:
        yield f"ranks wait {match[1]} %, blocked for {100 * blocked:.1f} %"


def late(facts, match):
    """A rank that is late waits less than those that wait for it."""
    rank, first, last = int(match[1]), int(match[2]), int(match[3])
    waits = [r.share("blocked", first, last + 1) for r in facts.ranks]
    others = [wait for number, wait in enumerate(waits) if number != rank]
    if share(match[5]) > np.mean(others) + 0.1:  # of the late steps, here of the whole range
        steps = f"in steps {first} to {last}"
        if not re.search(r"in every|now and then|in about|in blocks", match[0]):
            yield f"others wait {match[5]} %, blocked for {100 * np.mean(others):.1f} % {steps}"
    if waits[rank] > max(others) + LOOSE:
        yield f"rank {rank} waits more than the others"


def rarely_late(facts, match):
    """Others wait, in the steps that are named, for as long as the rank is said to be late."""
    rank, late_s = int(match[1]), seconds(match[2], match[3])
    count = int(match[5] or 1)
    first, last = (int(match[4]),) * 2 if match[4] else (int(match[6]), int(match[7]))
    blocked_s = [float(np.sum(r.seconds["blocked"][first : last + 1])) for r in facts.ranks]
    others_s = max(wait for number, wait in enumerate(blocked_s) if number != rank)
    if others_s < 0.8 * count * late_s:
        yield f"late by {count} times {late_s:.6f} s, others are blocked for {others_s:.6f} s"


def largest_loss(facts, match):
    """A phase that takes about what is said, and more than waiting."""
    phases = DOING[match[1]]
    if phases is None:
        return
    own = facts.mean_share(phases[0])
    if abs(own - share(match[2])) > LOOSE:
        yield f"{match[1]} is {match[2]} %, counted {100 * own:.1f} %"
    if own + LOOSE < facts.mean_share("blocked") / 2:  # of which a part is communication
        yield f"the ranks are blocked for {100 * facts.mean_share('blocked'):.1f} %"


def loader_costs(facts, match):
    own = max(rank.share("input") for rank in facts.ranks)
    compiled_once = 1 - max(rank.share("compilation") for rank in facts.ranks)
    if share(match[1]) > own / max(compiled_once, 0.01) + 0.05:
        yield f"{match[1]} % shorter, input is {100 * own:.1f} %"


def workers_are(facts, count):
    known = [value for counts in facts.counters("loader_workers") for value in counts]
    if known and count not in known:
        yield f"{count} workers, of {sorted(set(known))}"


def shifted(facts, match):
    step = int(match[3])
    slowest = np.max([rank.step_s[: facts.steps] for rank in facts.ranks], axis=0)
    ratio = np.median(slowest[:step]) / np.median(slowest[step:])
    said = float(match[1]) if match[2] == "faster" else 1 / float(match[1])
    if not 0.6 < ratio / said < 1.7:
        yield f"a factor of {said:.2f}, medians differ by {ratio:.2f}"


def updates_of(rank):
    """Return how often optimizers stepped: all else of the kind has a name of its own."""
    others = ("zero_grad", "unscale", "update_scale", "clip_grad_norm", "clip_grad_value")
    rows = rank.trace.events_of(Kind.OPTIMIZER)
    names = [rank.trace.names[number] for number in rows["name"].tolist()]
    return sum(name not in others and "grad" not in name for name in names)


def optimizer_ends(facts, match):
    for updates in map(updates_of, facts.ranks):
        if updates < facts.steps:
            yield f"{updates} updates in {facts.steps} steps"


def nothing_updates(facts, match):
    if any(updates := [updates_of(rank) for rank in facts.ranks]):
        yield f"updates by rank: {updates}"


# --- what advice says -----------------------------------------------------------------------------


def part_of(match):
    """Return seconds saved and seconds of the whole, as a proposal has them."""
    found = re.search(PART, match)
    if found is None:
        return None
    if found[1]:
        return seconds(found[1], found[2]), seconds(found[1], found[2])
    if found[3]:
        return seconds(found[3], found[5]), seconds(found[4], found[5])
    return seconds(found[6], found[7]), None


def reduced(facts, match):
    size = float(match[1].replace(",", "")) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(match[2])
    if not near(size, facts.reduced_bytes(), 0.02, 2):
        yield f"{match[1]} {match[2]} a step, counted {facts.reduced_bytes():.0f} B"
    if seconds(match[3], match[4]) > 1.05 * facts.per_step_s("blocked") + 2e-5:
        yield f"{match[3]} {match[4]} exposed, blocked for {facts.per_step_s('blocked'):.6f} s"


def evaluated(facts, match):
    count = max(rank.evaluations() for rank in facts.ranks)
    if int(match[1]) != count or count < 2:
        yield f"evaluated {match[1]} times, counted {count}"
    low = facts.mean_share("evaluation")
    high = sum(facts.mean_share(name) for name in ("evaluation", "input", "copy", "named")) + 0.1
    if not low - LOOSE <= share(match[2]) <= high:
        yield f"evaluation is {match[2]} %, counted {100 * low:.1f} to {100 * high:.1f} %"


def someone_evaluates(facts, match):
    counts = [rank.evaluations() for rank in facts.ranks]
    if max(counts) == 0 or min(counts) > max(counts) / 2:
        yield f"evaluations by rank: {counts}"


def buffers(facts, match):
    if not any(values.sum() for values in facts.counters("broadcast_buffer_bytes")):
        yield "no broadcast of buffers was recorded"


def collected(facts, match):
    each = [rank.seconds_named(Kind.HOST, match[1].lower()) / rank.steps for rank in facts.ranks]
    if not near(seconds(match[2], match[3]), np.mean(each), 0.05, 3e-5):
        yield f"{match[0]} counted {np.mean(each):.6f} s"


def no_core(facts, match):
    each = [
        values.sum() / 1e9 / rank.steps
        for values, rank in zip(facts.counters("main_not_running_ns"), facts.ranks, strict=True)
    ]
    if seconds(match[1], match[2]) > 1.1 * max(each) + 5e-5:
        yield f"{match[1]} {match[2]} without a core, counted {max(each):.6f} s"


def waits_for_data(facts, match):
    most = max(rank.seconds["input"].max(initial=0.0) for rank in facts.ranks)
    if seconds(match[3], match[4]) > most:
        yield f"{match[3]} {match[4]} of input in a step, at most {most:.6f} s"
    if match[5] is not None:
        yield from workers_are(facts, 0 if match[5] == "no" else int(match[5]))


def checkpoints(facts, match):
    count = max(len(rank.named(Kind.CHECKPOINT)) for rank in facts.ranks)
    if int(match[1]) != count or count < 2:
        yield f"{match[1]} checkpoints, counted {count}"


def late_and_waited(facts, match):
    rank = int(match[1])
    others = [r for r in facts.ranks if r.trace.rank != rank]
    most = max(float(np.max(r.seconds["blocked"], initial=0.0)) for r in others)
    if seconds(match[4], match[5]) > most + 2e-5:
        yield f"others wait {match[4]} {match[5]} a step, at most {most:.6f} s"


def even_wait(facts, match):
    if seconds(match[1], match[2]) > 1.05 * facts.per_step_s("blocked") + 2e-5:
        yield f"ranks wait {match[1]} {match[2]}, blocked for {facts.per_step_s('blocked'):.6f} s"


def nothing(facts, match):
    yield from ()


THINGS = "|".join(map(re.escape, DOING))
SPENT = rf"the largest part of a step is ({THINGS}) \({SHARE}\), followed by ({THINGS}) \({SHARE}\)"
ONCE = (
    rf"compiling the model took {SHARE} of the loop, and of the rest the largest part is "
    rf"({THINGS}) \({SHARE}\), followed by ({THINGS}) \({SHARE}\)"
)
EVEN = r"(?:No rank was late in|One rank took|In) ([\d,]+) steps?:? "
YET = (
    rf"No rank was late for long in [\d,]+ steps?, yet ranks wait for each other {SHARE} of the "
    r"time, (?:not always for the same rank|mostly for rank \d+, but in no regular pattern); "
)
LATE = (
    r"Rank (\d+) arrives [^;]*?between steps (\d+) and (\d+)([^;]*); (?:rank \d+ waits|the others "
    rf"wait) {SHARE} of each of these steps(?: \(confidence {SHARE}\))?\."
)
RARE = (
    rf"Rank (\d+) arrives {S} late in (?:step (\d+)|(\d+) of steps (\d+) to (\d+)), because [^;]*; "
    rf"(?:rank \d+ waits|the others wait) {SHARE} of (?:this step|each of these steps)\."
)
VERDICT = (
    (rf"The largest loss is ({THINGS}): {SHARE} of the loop\.", largest_loss),
    (RARE, rarely_late),
    (EVEN + SPENT + r"\.", even),
    (EVEN + "(?=compiling)", steps_are),
    (YET, they_wait),
    (ONCE + r"\.", compiled),
    (SPENT + r"\.", lambda facts, m: spent_is(facts, m, (m[1], m[3]), (m[2], m[4]))),
    (LATE, late),
    (r"Also late: [^.]*(?:\.py[^.]*|\.\d[^.]*)*\.|\d+ other ranks were late too[^.]*\.", nothing),
    (rf"With an infinitely fast loader a step would be {SHARE} shorter: ", loader_costs),
    (
        r"it has no workers, so that the loop itself loads; its slowest stage is [^()]*"
        r"(?:\([^()]*\))?\.",
        lambda facts, m: workers_are(facts, 0),
    ),
    (
        r"its (\d+) workers?(?: on each rank)? delivers? at most .*?(?:each batch|come unevenly|"
        r"is [^()]* of a batch(?: \([^()]*\))?)\.",
        lambda facts, m: workers_are(facts, int(m[1])),
    ),
    (
        rf"All ranks became ([\d.]+)x (faster|slower) at step (\d+) \({S} to {S} per step\)\.",
        shifted,
    ),
    (r"All ranks became [^()]* at step \d+ and [^()]* at step \d+\.", nothing),
    (r"The step time of all ranks changed \d+ times, [^()]*\([^()]*\)\.", nothing),
    (
        r"A step ends with each step of the optimizer\.|A step is one round of several",
        optimizer_ends,
    ),
    (r"(?<=one round of several) optimizers that step in turn\.", nothing),
    (
        r"No optimizer stepped: a step is one (?:batch from the loader|backward pass)\.",
        nothing_updates,
    ),
    (r"A step ends with each call of paceline\.step\(\)\.", nothing),
    (r"No step was recorded, so nothing is known about stragglers: [^.]*\.", nothing_updates),
    (r"Call paceline\.step\(\) once per iteration to mark steps\.", nothing),
    (
        r"What the processes that rank \d+ started did is not recorded[^.]*\. If they train[^.]*\.",
        nothing,
    ),
    (r"Each rank ran [^.]*\.", nothing),
)
ADVICE = (
    (
        rf"A rank gives ([\d.,]+) (B|KiB|MiB|GiB) to all-reduces in each step, and {S} of their",
        reduced,
    ),
    (rf"The run evaluated (\d+) times, which takes {SHARE} of the loop", evaluated),
    (r"(?:Rank \d+ evaluates|\d+ ranks evaluate) while the other", someone_evaluates),
    (r"DDP's broadcasts of buffers in each step take", buffers),
    (rf"(Garbage collection|Logging|Item) takes {S} of each step", collected),
    (rf"the training loop was ready without a core for {S} of each step", no_core),
    (
        rf"Of a mean step of {S} (?:the ranks wait|rank \d+ waits) {S} for data(?:; its loader has "
        r"(no|\d+) workers?)?",
        waits_for_data,
    ),
    (r"The run wrote (\d+) checkpoints? of", checkpoints),
    (
        rf"(?:On average r|R)ank (\d+) is {S} late in (?:each of these steps|this step), and the "
        rf"other ranks wait {S}",
        late_and_waited,
    ),
    (rf"No rank is late for long, yet in each step the ranks wait {S} for each other", even_wait),
    (r"It is busy for ", nothing),
    (r"Warm-up and drain of the pipeline are|Stage \d+ computes", nothing),
)


# --- a run ----------------------------------------------------------------------------------------


def judge_verdict(facts, text):
    """Return contradictions of a verdict, and what no pattern knows of it."""
    wrong, rest = [], text
    for pattern, check in VERDICT:
        for match in re.finditer(pattern, text):
            wrong += [f"{problem}: {match[0][:120]}" for problem in check(facts, match)]
            rest = rest.replace(match[0], " ")
    return wrong, [part for part in re.split(r"(?<=\.) ", rest.strip()) if part.strip(" .")]


def judge_advice(facts, found):
    """Return contradictions of one proposal, and whether its evidence was judged."""
    wrong, known = [], False
    for pattern, check in ADVICE:
        for match in re.finditer(pattern, found["evidence"]):
            known = True
            wrong += [f"{problem}: {match[0]}" for problem in check(facts, match)]
    saved = part_of(found["action"])
    if saved is not None and saved[1] is not None and saved[0] > saved[1] * 1.001:
        wrong.append(f"saves more than there is: {found['action']}")
    if not 0 < found["share"] <= 1:
        wrong.append(f"a share of {found['share']}")
    return wrong, known


def command(python, *words):
    arguments = [str(word) for word in (python, "-m", "paceline", *words)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}\n{done.stderr[-800:]}")
    return done.stdout


def same_everywhere(python, run):
    """Return what the terminal, the page and both JSON objects do not say alike."""
    why = json.loads(command(python, "why", run, "--json"))
    report = json.loads(command(python, "report", run, "--json"))
    terminal = " ".join(command(python, "why", run).split())
    page = " ".join(
        html.unescape(re.sub(r"<[^>]*>", " ", (run / "report.html").read_text())).split()
    )
    wrong = [
        f"why has another {key} than report"
        for key in ("verdict", "advice")
        if why[key] != report[key]
    ]
    texts = [why["verdict"]] + [a["action"] for a in why["advice"]]
    for text in texts:
        for place, shown in (("terminal", terminal), ("page", page)):
            if " ".join(text.split()) not in shown:
                wrong.append(f"the {place} lacks: {text[:90]}")
    return why, report, wrong


def judge(python, name, run):
    """Return the row of one run."""
    why, report, wrong = same_everywhere(python, run)
    facts = RunFacts(run)
    if report["steps"] != facts.steps:
        wrong.append(f"{report['steps']} steps, counted {facts.steps}")
    if facts.steps and not near(report["step_time_s"], facts.step_time_s(), 0.05):
        wrong.append(f"a step of {report['step_time_s']:.6f} s, counted {facts.step_time_s():.6f}")
    said, unknown = judge_verdict(facts, why["verdict"])
    wrong += said
    without = []
    for found in why["advice"]:
        problems, known = judge_advice(facts, found)
        without += [f"{found['rule']}: {problem}" for problem in problems]
        if not known:
            unknown.append(found["evidence"])
    return {
        "run": name,
        "steps": facts.steps,
        "contradictions": wrong,
        "advice": [found["rule"] for found in why["advice"]],
        "without_evidence": without,
        "not_judged": unknown,
    }


def record(python, name, ranks, folder):
    """Record a loop, and return the folder of its run."""
    place = folder / f"{name}-{ranks}"
    place.mkdir()
    script = "plain.py"
    if name in real_scripts.FRAMEWORKS:
        script = "frameworks.py"
    if name in PROJECTS:
        script = "projects.py"
    run, loop = place / "RUN", folder / "loops" / script
    words = [python, "-m", "paceline", "run", "-n", ranks, "--out", run, loop, name, STEPS]
    done = real_scripts.execute(words, place)
    if done.returncode:
        raise RuntimeError(f"{name} on {ranks} ranks failed:\n{done.stderr[-800:]}")
    return run


def all_runs():
    yield from ((name, 2) for name in (*real_scripts.PLAIN, *real_scripts.FRAMEWORKS))
    yield from ((name, 1) for name in (*ALONE, *ALONE_FRAMEWORKS))
    for name in PROJECTS:
        yield name, 1 if name in ("hogwild", "tiny_gpt") else 2


def main():
    chosen = options(__doc__, "--only", "--runs")
    report = Report("true_sentences", chosen.json)
    with tempfile.TemporaryDirectory(prefix="true-sentences-") as folder:
        if chosen.runs:
            for run in map(Path, chosen.runs):
                report.row(**judge(sys.executable, str(run), run))
        else:
            python = real_scripts.prepare()
            shutil.copytree(real_scripts.LOOPS, Path(folder) / "loops")
            wanted = [
                (name, ranks)
                for name, ranks in (QUICK if chosen.quick else all_runs())
                if not chosen.only or name in chosen.only
            ]
            for name, ranks in wanted:
                run = record(python, name, ranks, Path(folder))
                report.row(**judge(python, f"{name} on {ranks}", run))
    rows = report.rows
    for row in rows:
        for text in (*row["contradictions"], *row["without_evidence"]):
            tell(f"  {row['run']}: {text}")
        for text in row["not_judged"]:
            tell(f"  {row['run']}, not judged: {text}")
    if not (chosen.quick or chosen.only or chosen.runs):
        report.bar("recorded runs", len(rows), RUNS, at_least=True)
    report.bar("contradictions", sum(len(row["contradictions"]) for row in rows), 0)
    report.bar("advice without evidence", sum(len(row["without_evidence"]) for row in rows), 0)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
