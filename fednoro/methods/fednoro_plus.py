"""FedNoRo+: verdicts that may be nobody or everybody,
then purge, correct once, and train on everybody.

It goes beyond Wu et al., FedNoRo, IJCAI 2023, whose mixture always splits the clients in two, and
whose distillation collapses where most of them are noisy.

Stage 1, rounds 1..T1: FedLA. In the last `watch` rounds each client also measures how much of its
labels the model that it receives and the one that it trains explain, e_k
(`fednoro.detection.explained`). Then heads that are learnt from all the other clients say how far
its labels follow its images (`fednoro.detection.leave_one_out_heads`), and both together are its
doubt. Clients above a cut are noisy, S_n (`fednoro.detection.calibrated`). That may be nobody, and
then all that follows is FedLA, to the bit. If it is everybody, there is nobody to learn from, and
it is FedLA too, with a warning: to trust the half that explains most measured worse. But the
warm-up may have been too short to tell, so everybody is judged again every few rounds (`revise`) in
the first half of the run; later, models know wrong labels by heart. A client that could not be
judged is not trusted until it is.

Stage 2, purge, from the verdict on: FedLA on the clean clients S_c alone. In the middle of it
everybody is judged once more (`second_look`), because the model that clean clients have trained
parts the two kinds better. The teacher f_T is the mean of the global models of these rounds (of
those since the second verdict, if it is another), from the tenth on their moving average:

    w_T ← a w_T + (1 − a) w_g,   a = min(0.9, t / (t + 1)),   t = 0, 1, …

Correct, once: on each noisy client, by what the teacher says on average
about `views` augmented versions v of an image,

    p_i(y) ∝ mean_v softmax(f_T(v(x_i)))_y √(n_k(y) + ½)

n_k(y) being how many of its given labels are y. That is all that given labels are used for, because
annotators' mistakes depend on the image. q = p, unless EM for the true labels under the client's
own noise transitions, which takes mistakes for independent of the image, is given a share
(`opinion` o below 1):

    r_i(y) ∝ p_i(y) T_k(y, ȳ_i),   T_k(y, ·) ∝ Σ_i r_i(y) 1[ȳ_i = ·] + 2 I + 2/C
    q_i = o p_i + (1 − o) r_i

Stage 3: all clients. Clean ones as before; noisy ones learn

    L = −Σ_y q_i(y) log softmax(f(x_i) + log π_k)_y   with π_k = mean q

and models are weighted by their distance to the nearest clean one, as in FedNoRo. With `further`
above 1, for images that have no upright, all clients turn and shift theirs so many times as far as
they did before.

Each choice can be taken back: `detector` (heads on a sketch of the features, or explained shares
alone), `second_look` (one verdict), `ema` 0 (the last model as teacher), `views` 0 (plain images),
`opinion` (0: EM alone), `correct_every` (not once), `targets` (hard labels, or FedNoRo's
distillation with both sides adjusted in place of corrected labels), `aggregation` (by size alone),
`further` 1 (its default: images are moved alike in all stages).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fednoro.core.aggregate import average
from fednoro.core.losses import distill, log_prior, logit_adjusted_ce, one_hot
from fednoro.core.options import option
from fednoro.core.seeds import generator
from fednoro.core.training import FURTHER
from fednoro.core.types import (
    Clients,
    FedNoRoWarning,
    Replies,
    Reply,
    Site,
    State,
    Step,
    Task,
    UserError,
)
from fednoro.detection.calibrated import (
    AGAIN,
    FIRST,
    MOMENTS,
    WIDTHS,
    add_up,
    add_up_again,
    can_reconsider,
    judged_in,
    nobody_trusted,
    questions,
    reconsider,
    record,
    score,
    sum_features,
    suspects,
)
from fednoro.detection.explained import FEW, WATCH, WATCHED, watch, watching
from fednoro.detection.verdicts import clients_to_score, verdicts
from fednoro.methods.fednoro import by_distance
from fednoro.methods.method import Method
from fednoro.methods.relabel import soft_labels

TEACHER = "teacher"  # among a state's models
# In the memo: how many rounds were over when a client's labels were corrected.
CORRECTED = "corrected_after"
SOFT = "soft"  # in a client's memory: q, N×C; among a task's settings: that it is to be learnt
CORRECTED_FROM = "soft.given"  # in a client's memory: the labels that q was made of
DISTIL = "distil"  # among a task's settings: that the global model is to be learnt
LAMBDA, TEMPERATURE = 0.8, 0.8  # of that: FedNoRo's, at the end of its ramp


@dataclass(frozen=True)
class FedNoRoPlus(Method):
    """Finds noisy clients by what they and others make of their labels, purges,
    corrects labels, trains on all.
    """

    warmup: int = option(10, "rounds of FedLA before the clients are judged (T1)", ge=1)
    watch: int = option(
        WATCHED, "of these, the last ones in which clients measure what they can explain", ge=1
    )
    detector: Literal["calibrated", "sketched", "shares"] = option(
        "calibrated",
        "how clients are judged: by what they explain and what others' heads say, the same "
        "with heads on 64 numbers of an image (sketched), or by what they explain (shares)",
    )
    revise: int = option(
        5, "rounds after which everybody, if flagged, is judged again; 0: never", ge=0
    )
    second_look: bool = option(True, "whether everybody is judged again in the middle of the purge")
    purge: int | None = option(
        None, "rounds on clean clients alone; default: 4/9 of what follows the verdict", ge=0
    )
    ema: float = option(
        0.9,
        "how much of the teacher stays in a round, once it is the mean of enough of them",
        ge=0,
        lt=1,
    )
    views: int = option(
        8, "augmented views of an image that the teacher is asked about; 0: the plain image", ge=0
    )
    opinion: float = option(
        1.0, "share of the teacher's own opinion in corrected labels; the rest is EM's", ge=0, le=1
    )
    iterations: int = option(15, "steps of EM, where that has a share", ge=1)
    correct_every: int | None = option(
        None, "rounds after which labels are corrected anew; default: never", ge=1
    )
    targets: Literal["soft", "hard", "distil"] = option(
        "soft", "what noisy clients learn in the end"
    )
    aggregation: Literal["distance", "size"] = option(
        "distance", "what models are weighted by in the end"
    )
    further: float = option(
        1.0,
        "in the end, where some clients are flagged, how many times as far as train.augment says "
        "images are turned and shifted, up to half a turn and a quarter of the side; above 1 for "
        "images without an upright, such as skin lesions",
        ge=1,
    )
    noisy: tuple[int, ...] | None = option(
        None, "clients known to be noisy, as [0, 3]; default: they are looked for"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if twice := [k for k, times in Counter(self.noisy or ()).items() if times > 1]:
            raise UserError(
                "method.noisy must name each client once, "
                f"got {', '.join(map(str, twice))} more often"
            )

    def check(self, rounds: int) -> None:
        if self.warmup >= rounds:
            raise UserError(
                f"method.warmup must be below train.rounds ({rounds}), "
                f"got {self.warmup}: set either"
            )
        if self.watch > self.warmup and self.watch != WATCHED:
            # The default is no mistake: it stands for all of a short warm-up.
            raise UserError(
                f"method.watch must be at most method.warmup ({self.warmup}), "
                f"got {self.watch}: set either"
            )

    def check_clients(self, clients: int) -> None:
        if unknown := [k for k in self.noisy or () if not 0 <= k < clients]:
            raise UserError(
                "method.noisy must name clients of the federation, "
                f"from 0 to {clients - 1}, got {', '.join(map(str, unknown))}"
            )

    def purge_end(self, rounds: int, verdict_round: int) -> int:
        """The round after which noisy clients come back;
        they do not where that is beyond the run.
        """
        return verdict_round + (
            max(1, round(4 / 9 * (rounds - verdict_round))) if self.purge is None else self.purge
        )

    def second_look_rounds(self, rounds: int, verdict_round: int) -> range:
        """After which rounds a second verdict may be found:
        in the middle of the purge, or a round later if that fails.

        The purge has two rounds at least before it, and two after it.
        """
        end = min(self.purge_end(rounds, verdict_round), rounds)
        middle = verdict_round + (end - verdict_round) // 2
        if not self.second_look or not WIDTHS[self.detector] or middle < verdict_round + 2:
            return range(0)
        return range(middle, min(middle + 2, end - 1))

    # Server

    def plan(self, state: State, clients: Clients) -> dict[int, Task]:
        if state.round < self.warmup:
            settings = watching(state, self.warmup, self.watch) if self.noisy is None else {}
            return {k: Task("train", state.round, state.model, settings) for k in clients.drawn}
        may_change, width = self._may_change(state), WIDTHS[self.detector]
        due = may_change and state.round - judged_in(state, self.warmup) >= self.revise
        if due and state.memo.get("asked_in") != state.round:
            # Where nobody answers, everybody is asked in a later round.
            return questions(state, clients, clients.present, width, anew=True)
        if self._second_look_due(state) and state.memo.get("asked_in") != state.round:
            current_verdicts = verdicts(state)
            # Other clients are judged later, by what comes of it.
            judged_clients = [k for k in clients.present if k in current_verdicts]
            if len(judged_clients) > FEW:
                return questions(state, clients, judged_clients, width, anew=True)
        if self.noisy is None and (unknown := clients_to_score(state, clients)):
            return questions(state, clients, unknown, width)
        if may_change:
            return {
                k: Task("train", state.round, state.model, {WATCH: True}) for k in clients.drawn
            }
        noisy, participants = self._suspects(state, clients.present), clients.drawn
        if state.round == self.warmup and (
            unknown := sorted(set(self.noisy or ()) - set(clients.present))
        ):
            message = (
                "method.noisy names clients that are not there: "
                f"{', '.join(map(str, unknown))} (counted from 0)"
            )
            warnings.warn(message, FedNoRoWarning, stacklevel=2)
        if self._purging(state):
            clean = [k for k in clients.present if k not in noisy]
            if noisy and clean:
                rng = generator(state.seed, "purge", state.round)
                draw = rng.choice(
                    np.array(clean), min(len(clean), len(clients.drawn)), replace=False
                )
                participants = tuple(sorted(int(k) for k in draw))
            return {k: Task("train", state.round, state.model) for k in participants}
        waiting = (
            [k for k in participants if k in noisy and self._correction_due(state, k)]
            if self.targets != DISTIL
            else []
        )
        if waiting and state.memo.get("corrected_in") != state.round:
            # Who does not answer is asked in a later round.
            return {
                k: Task("correct", state.round, state.models.get(TEACHER, state.model))
                for k in waiting
            }
        target = {DISTIL if self.targets == DISTIL else SOFT: True}
        augment = {FURTHER: self.further} if self.further > 1 and self._some_flagged(state) else {}
        return {
            k: Task(
                "train", state.round, state.model, {**augment, **(target if k in noisy else {})}
            )
            for k in participants
        }

    def _purging(self, state: State) -> bool:
        """Whether noisy clients are still left out;
        once their labels are corrected, they are not.
        """
        return CORRECTED not in state.memo and state.round < self.purge_end(
            state.rounds, judged_in(state, self.warmup)
        )

    def _may_change(self, state: State) -> bool:
        """Whether everybody is flagged,
        and is to be judged again before half of the run is over.
        """
        if self.noisy is not None or not self.revise or not nobody_trusted(state):
            return False
        return 2 * max(state.round, judged_in(state, self.warmup) + self.revise) <= state.rounds

    def _second_look_due(self, state: State) -> bool:
        """Whether the second verdict is due and still to come."""
        if self.noisy is not None or not self._purging(state) or not can_reconsider(state):
            return False
        return state.round in self.second_look_rounds(state.rounds, judged_in(state, self.warmup))

    def _suspects(self, state: State, clients: Collection[int]) -> set[int]:
        return (
            suspects(state, clients)
            if self.noisy is None
            else {k for k in clients if k in self.noisy}
        )

    def _some_flagged(self, state: State) -> bool:
        """Whether a verdict flags some clients and trusts others, or `noisy` names any."""
        return bool(self._suspects(state, verdicts(state)) if self.noisy is None else self.noisy)

    def _correction_due(self, state: State, client: int) -> bool:
        last_round = state.memo.get(CORRECTED, {}).get(str(client))
        return last_round is None or (
            self.correct_every is not None and state.round - last_round >= self.correct_every
        )

    def fold(self, state: State, replies: Replies) -> State:
        if replies.task == MOMENTS:
            return (add_up_again if self._second_look_due(state) else add_up)(state, replies)
        if replies.task == "score":
            return (
                reconsider(state, list(replies))
                if FIRST in state.memo
                else self._fold_scores(state, replies)
            )
        if replies.task == "correct":
            correction_rounds = {
                **state.memo.get(CORRECTED, {}),
                **{str(reply.client): state.round for reply in replies},
            }
            memo = {**state.memo, CORRECTED: correction_rounds, "corrected_in": state.round}
            return replace(state, memo=memo, stage="correction", notes={})
        if state.round < self.warmup:
            return replace(super().fold(state, replies), stage="warm-up")
        noisy = self._suspects(state, replies.asked_clients)
        flagged = self._some_flagged(state)
        if self._purging(state):
            if noisy:
                warnings.warn(
                    "no clean client to train on: noisy ones take part",
                    FedNoRoWarning,
                    stacklevel=2,
                )
            return self._update_teacher(
                state,
                replace(super().fold(state, replies), stage="purge" if flagged else "training"),
            )
        # Among clean clients every distance is 0: FedAvg, to the bit, without holding all models.
        distant = bool(noisy) and self.aggregation == "distance"
        flags = {k: k in noisy for k in replies.asked_clients}
        after = by_distance(state, replies, flags) if distant else super().fold(state, replies)
        if self.correct_every is not None:
            after = self._update_teacher(state, after)
        last = "distillation" if self.targets == DISTIL else "training on corrected labels"
        return replace(after, stage=last if flagged else "training")

    def _fold_scores(self, state: State, replies: Replies) -> State:
        after = record(state, list(replies))
        if "detector" not in state.memo and nobody_trusted(after):
            until = f", judged again every {self.revise} rounds up to round {state.rounds // 2}"
            again = until if self._may_change(after) else ""
            message = (
                "every client looks noisy and there is none to learn from: "
                f"going on as FedLA{again}"
            )
            warnings.warn(message, FedNoRoWarning, stacklevel=2)
        return after

    def _update_teacher(self, state: State, after: State) -> State:
        second = state.memo.get(AGAIN, {})
        t = state.round - (
            second["round"] if second.get("changed") else judged_in(state, self.warmup)
        )
        a = min(self.ema, t / (t + 1))
        teacher = average([(state.models.get(TEACHER, state.model), a), (after.model, 1 - a)])
        return replace(after, models={**state.models, TEACHER: teacher})

    # Client

    def aux(self, task: Task, site: Site) -> dict[str, Tensor]:
        if SOFT not in task.settings:
            log_pi = log_prior(site.counts)
            return (
                {"log_pi": log_pi, "lam": log_pi.new_full((), LAMBDA)}
                if DISTIL in task.settings
                else {"log_pi": log_pi}
            )
        pi = self.rows(task, site)["q"].mean(dim=0)
        return {"log_pi": pi.clamp(min=torch.finfo(pi.dtype).tiny).log()}  # 0 · log 0 would be NaN

    def rows(self, task: Task, site: Site) -> dict[str, Tensor]:
        if SOFT not in task.settings:
            return {}
        return {"q": site.memory[SOFT].to(site.labels.device, non_blocking=True)}

    def loss(self, step: Step) -> Tensor:
        logits, log_pi = step.net(step.x), step.aux["log_pi"]
        if "q" in step.rows:
            return F.cross_entropy(logits + log_pi, step.rows["q"])
        if "lam" in step.aux:
            with torch.no_grad():
                teacher = step.anchor(step.x)
            return distill(
                logits, step.y, teacher, step.aux["lam"], TEMPERATURE, log_pi, adjust="both"
            )
        return logit_adjusted_ce(logits, step.y, log_pi)

    def work(self, task: Task, site: Site) -> Reply:
        if task.name == MOMENTS:
            return sum_features(task, site)
        if task.name == "score":
            return score(task, site)
        if task.name == "correct":
            return Reply(site.client, site.size, metrics={"relabelled": self._correct(task, site)})
        if SOFT in task.settings and SOFT not in site.memory:
            # It was not there when the teacher asked: the global model will do.
            self._correct(task, site)
        reply = super().work(task, site)
        if WATCH in task.settings:
            watch(task, site, reply.weights)
        return reply

    def _correct(self, task: Task, site: Site) -> Tensor:
        """Keeps q; says how many labels are no longer the most probable ones."""
        q = soft_labels(
            self._opinion(task, site), site.labels, site.classes, self.iterations, self.opinion
        )
        site.memory[CORRECTED_FROM] = site.labels
        site.memory[SOFT] = (
            one_hot(q.argmax(dim=1), site.classes) if self.targets == "hard" else q
        ).float()
        return (q.argmax(dim=1) != site.labels).sum()

    def _opinion(self, task: Task, site: Site) -> Tensor:
        """What the teacher says about each image, N×C in float64:
        probabilities, mean over the views.
        """
        if not self.views:
            return torch.softmax(site.logits(task, task.weights).double(), dim=1)
        # A task's name keys the random draws.
        tasks = [replace(task, name=f"{task.name}.{view}") for view in range(self.views)]
        probabilities = (
            torch.softmax(site.logits(view, task.weights, augment=True).double(), dim=1)
            for view in tasks
        )
        return torch.stack(list(probabilities)).mean(dim=0)
