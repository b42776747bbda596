"""What cheating pays: the income of attackers beside honest clients, under five ways of paying.

30 clients (Dirichlet 0.5) train a small classifier on images; 10 of them each round, chosen at
random; 20 % attack. Each round has the same pool of tokens, divided in proportion to the scores.

    claimed    pay and weight by the number of samples that clients claim: the usual baseline
    averaged   GTG-Shapley as published: coalitions are averages, all clients play; no gate
    records    selection and pay by records of accuracy with random exploration, as published
    gate       ours without data: gate, agreement, reputation
    ours       gate, then GTG-Shapley with fixed weights on 300 images of the server, reputation

Income is per head, attackers over honest clients of the same run. "paired" divides by the income
of the same clients, in the same rounds, when they do not attack: it shows what the attack added,
and not which data the attackers happened to have. Sybils: all of them together over one honest
client; "alone" is what the client whose update they send earns when it is honest. AUC: of the
likelihood of an attack at the end, attackers against honest clients. Accuracy: mean over the last
third of the rounds, on images that pay for nothing. "least": income of the honest client at the
first decile, over the mean.

    python bench/incentives.py --json [--quick] [--data DIR] [--outcomes FILE [--minutes M]]

DIR holds `fashion-mnist/`; without it the digits of scikit-learn stand in, and no figure is
compared with a bar.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict, deque
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from harness import Report, tell
from incentives_federation import ATTACKS, Honest, accuracy, losses, make_world, name

from paceline.core.randomness import make_generator
from paceline.federated.aggregation import clip, equal_shares, sample_shares, weighted_sum
from paceline.federated.contribution import (
    AccuracyRecords,
    CoalitionGame,
    Contribution,
    ContributionOptions,
    ShapleyOptions,
    gtg_shapley,
)
from paceline.federated.simulate.images import read_images
from paceline.federated.updates import check_updates

CLIENTS, COHORT, ATTACKERS, ALPHA = 30, 10, 6, 0.5
VALIDATION = 300
SHAPLEY = ShapleyOptions(most_sweeps=2)  # 20 orders of 10 clients
PROCESSES = 2
REEXAMINED = 0.1  # chance that a client that is not admitted is asked all the same
RARE = 2  # clients that own a class
BASELINES = ("claimed", "averaged", "records", "gate")
SCHEMES = (*BASELINES, "ours")
FREE_RIDERS = ("noise", "noise_steady", "replay", "flip")
# Attacks whose updates differ from honest ones: only these can be detected from updates.
DETECTABLE = tuple(name for name in ATTACKS if name not in ("none", "inflate", "rare"))
# Harder variants than those that the bars are for; their figures are reported without a bar.
VARIANTS = ("noise_steady", "sybil_noisy", "lazy_scaled")
# Attacks that show what the other ways of paying are good for.
USUAL = ("none", "noise", "replay", "flip", "inflate", "sybil")
COMPARED = {
    "claimed": USUAL,
    "averaged": USUAL,
    "records": (*USUAL, "rare"),
    "gate": (*USUAL, "noise_steady", "sign", "lazy", "rare", "rare_flip"),
}
QUICK = ("none", "noise", "replay", "flip", "sybil", "rare")


# ------------------------------------------------------------------ ways of paying


@dataclass
class Settled:
    """What a scheme decided in a round: by the identity that sent an update."""

    scores: dict
    change: np.ndarray | None
    refused: frozenset = frozenset()
    likelihood: dict | None = None


class Scheme:
    """Chooses at random; a scheme overrides what it does differently."""

    def __init__(self, parameters, seed):
        self.parameters, self.seed = parameters, seed
        self.identities = {}  # of clients that do not go by their first one

    def select(self, clients, rng):
        return list(rng.choice(clients, COHORT, replace=False))


class Claimed(Scheme):
    def settle(self, updates, utility, accuracy_of):
        samples = [update.samples for update in updates]
        scores = {update.client: update.samples for update in updates}
        return Settled(scores, mean(updates, sample_shares(samples)))


class Averaged(Scheme):
    def settle(self, updates, utility, accuracy_of):
        game = CoalitionGame([update.delta for update in updates], utility, averaged=True)
        values = gtg_shapley(
            game, make_generator(self.seed, "shapley", updates[0].version), SHAPLEY
        )
        scores = {u.client: max(0.0, v) for u, v in zip(updates, values, strict=True)}
        return Settled(scores, mean(updates, equal_shares(len(updates))))


class Records(Scheme):
    def __init__(self, parameters, seed):
        super().__init__(parameters, seed)
        self.records = AccuracyRecords()

    def select(self, clients, rng):
        numbers = {name(client): client for client in clients}
        return [numbers[known] for known in self.records.select(list(numbers), COHORT, rng)]

    def settle(self, updates, utility, accuracy_of):
        reached = {update.client: accuracy_of(update.delta) for update in updates}
        scores = self.records.scores(reached, accuracy_of(None))
        return Settled(scores, mean(updates, equal_shares(len(updates))))


class Ours(Scheme):
    def __init__(self, parameters, seed):
        super().__init__(parameters, seed)
        options = ContributionOptions(shapley=SHAPLEY)
        self.contribution = Contribution(parameters, seed=seed, options=options)

    def select(self, clients, rng):
        asked = [
            client
            for client in rng.permutation(clients)
            if self.contribution.admits(self.identities.get(client, name(client)))
            or rng.random() < REEXAMINED
        ]
        return asked[:COHORT]

    def settle(self, updates, utility, accuracy_of):
        accepted, refusals = check_updates(updates, self.parameters)
        found = self.contribution.score(accepted, utility)
        deltas = [clip(update.delta, found.clip_norm) for update in accepted]
        weights = [score.weight for score in found.clients]
        change = weighted_sum(deltas, weights) if any(weights) else None
        if change is not None:
            self.contribution.applied(change)
        return Settled(
            {score.client: score.score for score in found.clients},
            change,
            frozenset(refusal.client for refusal in refusals)
            | {score.client for score in found.clients if score.score == 0},
            {score.client: score.likelihood for score in found.clients},
        )


class Gate(Ours):
    def settle(self, updates, utility, accuracy_of):
        return super().settle(updates, None, accuracy_of)


MAKERS = dict(zip(SCHEMES, (Claimed, Averaged, Records, Gate, Ours), strict=True))


def mean(updates, shares):
    return weighted_sum([update.delta for update in updates], shares)


# ------------------------------------------------------------------ a run


def run(images, attack, scheme, seed, rounds):
    """Return incomes, likelihoods and accuracy of one federation."""
    is_rare = attack.startswith("rare")
    rare = tuple(range(RARE)) if is_rare else ()
    has_attackers = attack not in ("none", "rare")
    attackers = frozenset(range(len(rare), len(rare) + ATTACKERS)) if has_attackers else frozenset()
    world = make_world(images, seed, clients=CLIENTS, alpha=ALPHA, rare=rare)
    honest, attacker = Honest(frozenset()), ATTACKS[attack](attackers)
    weights = world.classifier.initial(make_generator(seed, "model"))
    paying = MAKERS[scheme](weights.size, seed)
    income, likelihood, reached = defaultdict(float), {}, []
    half = len(images.test_labels) // 2
    held_x, held_y = images.test_images[:half], images.test_labels[:half]
    own_x, own_y = (part[half : half + VALIDATION] for part in images[2:])
    for number in range(rounds):
        chosen = paying.select(list(range(CLIENTS)), make_generator(seed, "select", number))
        updates, senders = [], {}
        for client in map(int, chosen):
            rng = make_generator(seed, "train", number, client)
            kind = attacker if client in attackers else honest
            update = kind.update(world, weights, client, rng)
            identity = kind.identity(client)
            senders[identity] = client
            paying.identities[client] = identity
            updates.append(renamed(update, identity))

        def utility(change, weights=weights):
            return -float(losses(world.classifier, weights + change, own_x, own_y).mean())

        def accuracy_of(delta, weights=weights):
            model = weights if delta is None else weights + delta
            return accuracy(world.classifier, model, own_x, own_y)

        settled = paying.settle(updates, utility, accuracy_of)
        pool = sum(settled.scores.values())
        for identity, score in settled.scores.items():
            income[identity] += score / pool if pool > 0 else 0.0
        likelihood.update(settled.likelihood or {})
        for identity in settled.refused:
            attacker.refused(senders[identity])
        if settled.change is not None:
            weights = weights + settled.change
        world.steps.append(settled.change if settled.change is not None else 0 * weights)
        if 3 * number >= 2 * rounds:
            reached.append(accuracy(world.classifier, weights, held_x, held_y))
    by_client = np.zeros(CLIENTS)
    for identity, tokens in income.items():
        by_client[client_of(identity)] += tokens
    return {
        "attack": attack,
        "scheme": scheme,
        "seed": seed,
        "rounds": rounds,
        "attackers": sorted(attackers),
        "rare": list(rare),
        "income": by_client.tolist(),
        "auc": auc(likelihood, attackers),
        "accuracy": statistics.mean(reached),
    }


def renamed(update, identity):
    return replace(update, client=identity)


def client_of(identity):
    return int(identity.split("-")[1])


def auc(likelihood, attackers):
    """Return how often an attacker's likelihood is above an honest client's; None: no such."""
    bad = [value for identity, value in likelihood.items() if client_of(identity) in attackers]
    good = [value for identity, value in likelihood.items() if client_of(identity) not in attackers]
    if not bad or not good:
        return None
    pairs = list(itertools.product(bad, good))
    return sum((b > g) + 0.5 * (b == g) for b, g in pairs) / len(pairs)


# ------------------------------------------------------------------ all runs


def figures(outcome, plain):
    """Return the figures of a run; `plain` is the one without an attack."""
    income = np.array(outcome["income"])
    group = outcome["attackers"] or outcome["rare"]
    if not group:
        return {"least": float(np.quantile(income, 0.1) / income.mean())}
    others = [c for c in range(CLIENTS) if c not in group and c not in outcome["rare"]]
    heads = max(float(income[others].mean()), 1e-9)
    found = {"income": float(income[group].mean()) / heads}
    before = np.array(plain["income"])
    usual = float(before[group].mean()) / max(float(before[others].mean()), 1e-9)
    found["paired"] = found["income"] / max(usual, 1e-9) if outcome["attackers"] else None
    if outcome["attack"].startswith("sybil"):
        found["together"] = float(income[group].sum()) / heads
        # The update that all of them send is that of the first: what it earns alone.
        found["alone"] = float(before[group[0]]) / max(float(before[others].mean()), 1e-9)
    if outcome["rare"] and outcome["attackers"]:
        found["rare"] = float(income[outcome["rare"]].mean()) / heads
    return found


def jobs(quick, seeds):
    """Yield attack, scheme and seed of all runs: first those that bars are for."""
    attacks = QUICK if quick else ATTACKS
    for seed in seeds:
        for attack in attacks:
            yield attack, "ours", seed
    for seed in seeds:
        for scheme in ("claimed",) if quick else BASELINES:
            for attack in attacks:
                if attack in COMPARED[scheme]:
                    yield attack, scheme, seed


def work(job):
    """Run in a worker process, which reads the images once."""
    folder, rounds, (attack, scheme, seed) = job
    if folder not in IMAGES:
        IMAGES[folder] = read_images(folder)
    return run(IMAGES[folder], attack, scheme, seed, rounds)


IMAGES = {}


def summary(outcomes, attack, scheme):
    """Return the row of an attack under a scheme: means over the seeds; empty without any."""
    by_key = {key(o): o for o in outcomes}
    plain_name = "rare" if attack.startswith("rare") else "none"
    mine = [
        o
        for o in outcomes
        if (o["attack"], o["scheme"]) == (attack, scheme)
        and (plain_name, scheme, o["seed"]) in by_key
    ]
    if not mine:
        return {}
    each = [figures(o, by_key[plain_name, scheme, o["seed"]]) for o in mine]
    row = {"attack": attack, "scheme": scheme, "seeds": len(mine)}
    for figure in ("income", "paired", "together", "alone", "rare", "least"):
        values = [f[figure] for f in each if f.get(figure) is not None]
        if values:
            row[figure] = statistics.mean(values)
            row[f"{figure}_range"] = [min(values), max(values)]
    areas = [o["auc"] for o in mine if o["auc"] is not None]
    if areas:
        row["auc"] = statistics.mean(areas)
    plain = [by_key[plain_name, scheme, o["seed"]]["accuracy"] for o in mine]
    row["accuracy"] = statistics.mean(o["accuracy"] for o in mine)
    row["accuracy_loss"] = statistics.mean(plain) - row["accuracy"]
    return row


def against_claims(outcomes, attack, scheme):
    """Return how tokens and accuracy differ from paying by claimed size, under one attack.

    TIFF reports up to 6.9 % more tokens for normal providers, up to 18.1 % fewer for malicious
    ones, and up to 7.4 % more accuracy; its setting differs from this one.
    """
    by_key = {key(o): o for o in outcomes}
    pairs = [
        (outcome, by_key[attack, "claimed", seed])
        for (name, paying, seed), outcome in by_key.items()
        if (name, paying) == (attack, scheme) and (attack, "claimed", seed) in by_key
    ]
    group = pairs[0][0]["attackers"]
    others = [client for client in range(CLIENTS) if client not in group]

    def tokens(index, clients):
        return statistics.mean(float(np.array(p[index]["income"])[clients].mean()) for p in pairs)

    return {
        "attack": attack,
        "scheme": f"{scheme} against claimed",
        "normal_tokens": tokens(0, others) / tokens(1, others) - 1,
        "malicious_tokens": tokens(0, group) / tokens(1, group) - 1,
        "accuracy_gain": statistics.mean(a["accuracy"] - b["accuracy"] for a, b in pairs),
    }


def judge(report, rows):
    """Add the bars, which stand in the issue."""
    for row in rows:
        if row["attack"] == "flip" and row["scheme"] == "ours against claimed":
            report.bar(
                "flip: more tokens for honest clients", row["normal_tokens"], 0.069, at_least=True
            )
            report.bar("flip: change of the attackers' tokens", row["malicious_tokens"], -0.181)
    ours = {row["attack"]: row for row in rows if row["scheme"] == "ours"}
    for attack in FREE_RIDERS:
        if attack in ours:
            report.bar(f"income of {attack}", ours[attack]["income"], 0.3)
    if "inflate" in ours:
        report.bar("income of inflate, paired", ours["inflate"]["paired"], 1.05)
    sybil = ours["sybil"]
    report.bar("income of all sybils over one honest client", sybil["together"], 1.2)
    report.bar(
        "income of all sybils over the client that they copy, when it is honest",
        sybil["together"] / sybil["alone"],
        1.2,
    )
    report.bar("income of rare data", ours["rare"]["income"], 0.8, at_least=True)
    if "rare_flip" in ours:
        report.bar(
            "income of rare data among flippers", ours["rare_flip"]["rare"], 0.8, at_least=True
        )
    detected = {name: row for name, row in ours.items() if name in DETECTABLE}
    for attack, row in detected.items():
        if attack in VARIANTS:
            continue
        report.bar(f"AUC of {attack}", row["auc"], 0.95, at_least=True)
    worst = max(detected.values(), key=lambda row: row["accuracy_loss"])
    report.bar(f"accuracy loss, worst ({worst['attack']})", worst["accuracy_loss"], 0.01)
    base = {row["attack"]: row for row in rows if row["scheme"] == "claimed"}
    report.bar(
        "accuracy given up without an attack",
        base["none"]["accuracy"] - ours["none"]["accuracy"],
        0.01,
    )


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="one seed, few attacks")
    parser.add_argument("--data", default="", help="folder that holds fashion-mnist/")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--outcomes", help="file that keeps each run, to continue from", default="")
    parser.add_argument("--minutes", type=float, default=180, help="start no run after as many")
    parser.add_argument("--only", help="attacks, separated by commas; no bars", default="")
    parser.add_argument("--schemes", help=argparse.SUPPRESS, default="")
    return parser.parse_args()


def run_all(todo, kept, seconds):
    """Return the outcomes of the runs that were started within `seconds`, and those in `kept`."""
    text = kept.read_text() if kept and kept.exists() else ""
    known = [json.loads(line) for line in text.splitlines()]
    done = {key(o): o for o in known if o["rounds"] == todo[0][1]}
    missing = deque(job for job in todo if job[2] not in done)
    end = time.monotonic() + seconds
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read by the workers when they import NumPy
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        running = set()
        while missing or running:
            while missing and len(running) < 2 * PROCESSES and time.monotonic() < end:
                running.add(pool.submit(work, missing.popleft()))
            if not running:
                break
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for outcome in (future.result() for future in ended):
                done[key(outcome)] = outcome
                if kept:
                    with kept.open("a") as file:
                        file.write(json.dumps(outcome) + "\n")
    return [done[job[2]] for job in todo if job[2] in done]


def key(outcome):
    return outcome["attack"], outcome["scheme"], outcome["seed"]


def main():
    chosen = parse()
    report = Report("incentives", chosen.json)
    begin = time.perf_counter()
    seeds = range(1 if chosen.quick else chosen.seeds)
    only = {*chosen.only.split(","), "none", "rare"}
    schemes = chosen.schemes.split(",") if chosen.schemes else SCHEMES
    rounds = 20 if chosen.quick else chosen.rounds
    folder = str(Path(chosen.data) / "fashion-mnist") if chosen.data else ""
    todo = [
        (folder, rounds, job)
        for job in jobs(chosen.quick, seeds)
        if job[1] in schemes and (not chosen.only or job[0] in only)
    ]
    kept = Path(chosen.outcomes) if chosen.outcomes else None
    outcomes = run_all(todo, kept, 60 * chosen.minutes)
    tell(f"{len(outcomes)} of {len(todo)} runs, {time.perf_counter() - begin:.0f} s")
    pairs = dict.fromkeys((outcome["attack"], outcome["scheme"]) for outcome in outcomes)
    for attack, scheme in pairs:
        if row := summary(outcomes, attack, scheme):
            report.row(**row)
    for attack, scheme in pairs:
        if (attack, "claimed") in pairs and scheme in ("records", "ours") and attack != "none":
            report.row(**against_claims(outcomes, attack, scheme))
    if chosen.only:
        print(json.dumps(report.rows))
        return 0
    if chosen.data:
        judge(report, report.rows)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
