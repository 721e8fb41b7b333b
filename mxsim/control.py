"""A precision controller: plain numbers in, a decision out, whatever the training loop.

A ``Policy`` is data: a ladder of rungs from the cheapest precision to the dearest, triggers that
say which signal beyond which level asks for more precision, and limits (lock, calm, budget).  The
``Controller`` is its state; every decision carries its reason.  It knows nothing of models: the
loop measures, changes precision, keeps and restores states.  mxsim's own loop is controlled.py.

Related: GNMR (Kong et al. 2026, arXiv:2606.00539) compares gradient norms with their historical
mean, with a budget and a lock interval; restarting from a checkpoint with batches skipped is what
Chowdhery et al. (2022, PaLM, arXiv:2204.02311) did about loss spikes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mxsim.formats import choose
from mxsim.layout import as_integer

DERIVED = ("loss_ratio", "grad_ratio", "grad_jump")
"""Signals that the controller works out itself, from the loss and the gradient's norm."""
Action = Literal["hold", "escalate", "relax", "roll_back"]


@dataclass(frozen=True)
class Trigger:
    """Ask for more precision when a signal is beyond ``level``.

    - signal: one of DERIVED, or any name that ``observe`` is given (``Controller.unseen`` says
      which never were).
    - side: ``above`` or ``below`` the level is trouble.
    - quiet: the level at which it counts as calm again (hysteresis), on the other side of
      ``level`` or equal to it.
    - persist: so many observations in a row.
    - roll_back: go back to the last good state, too.
    - to_top: straight to the dearest rung instead of the next.
    """

    signal: str
    level: float
    quiet: float
    side: Literal["above", "below"] = "above"
    persist: int = 1
    roll_back: bool = False
    to_top: bool = False

    def __post_init__(self) -> None:
        choose("side", self.side, ("above", "below"))
        for name in ("level", "quiet"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number; got {value!r}")
        if as_integer("persist", self.persist, "an integer of at least 1") < 1:
            raise ValueError(f"persist must be at least 1; got {self.persist}")
        if math.isnan(self.level) or math.isnan(self.quiet) or self._beyond(self.quiet):
            raise ValueError(
                f"quiet of trigger {self.signal!r} must not be {self.side} its level "
                f"{self.level:g}; got {self.quiet:g}"
            )

    def _beyond(self, value: float) -> bool:
        return value > self.level if self.side == "above" else value < self.level

    def fires(self, value: float) -> bool:
        """Whether one value is trouble; a NaN is."""
        return math.isnan(value) or self._beyond(value)

    def is_quiet(self, value: float) -> bool:
        """Whether one value is calm; a NaN is not."""
        return value <= self.quiet if self.side == "above" else value >= self.quiet


@dataclass(frozen=True)
class Policy:
    """What a Controller does, as data.

    - ladder: names of the rungs, cheapest first; training begins at ``first``.
    - triggers: what asks for more precision.  A loss or norm that is not finite always does, goes
      to the top and rolls back if it can.
    - lock: steps after a move in which no other is made (but for what is not finite).
    - calm: steps in a row in which all triggers were quiet, before one rung is given back; None:
      never.
    - budget: the largest share of the steps so far (of ``warmup``, if more) that may be spent
      above the first rung.  To leave that there must be room for a whole lock interval, or it is
      refused and logged; a spent budget brings it back, whatever the lock.  A rollback costs none.
      None: no limit.
    - window: observations in the running medians and means.
    - warmup: steps before which no trigger counts, as references have yet to settle.
    - save_every: steps between states to be kept; one counts as good when for that many further
      steps all triggers were quiet.  None: nothing is kept, nothing rolled back.
    - rollbacks: how many there may be in a run.

    Raises ValueError or TypeError naming the field, its value and what is allowed.
    """

    ladder: tuple[str, ...]
    triggers: tuple[Trigger, ...] = ()
    first: int = 0
    lock: int = 20
    calm: int | None = 100
    budget: float | None = None
    window: int = 50
    warmup: int = 50
    save_every: int | None = None
    rollbacks: int = 5

    def __post_init__(self) -> None:
        for name, kind in (("ladder", str), ("triggers", Trigger)):
            values = getattr(self, name)
            if isinstance(values, str) or not all(isinstance(value, kind) for value in values):
                raise TypeError(f"{name} must be a sequence of {kind.__name__}; got {values!r}")
            object.__setattr__(self, name, tuple(values))
        if not self.ladder or len(set(self.ladder)) < len(self.ladder):
            raise ValueError(f"ladder must have rungs of different names; got {self.ladder}")
        for name, least in (("first", 0), ("lock", 0), ("window", 2), ("warmup", 0)):
            _at_least(name, getattr(self, name), least)
        for name in ("calm", "save_every"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("rollbacks", self.rollbacks, 0)
        if self.first >= len(self.ladder):
            raise ValueError(f"first must be below {len(self.ladder)}; got {self.first}")
        if self.budget is not None and not 0 <= self.budget <= 1:
            raise ValueError(f"budget must be a share from 0 to 1, or None; got {self.budget}")
        if self.save_every is None and any(t.roll_back for t in self.triggers):
            raise ValueError("save_every must be given where a trigger rolls back; got None")


def _at_least(name: str, value: object, least: int) -> None:
    if as_integer(name, value, f"an integer of at least {least}") < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


@dataclass(frozen=True)
class Decision:
    """What to do after step ``step``, and why.

    - rung: the name of the precision for the next step.
    - save: keep the state after this step, under its number.
    - restore: put back the state kept under that number, weights and moments; then go on with the
      next batches under ``rung``.
    - kept: numbers of the states that may still be restored; others can be dropped.
    """

    step: int
    action: Action
    rung: str
    reason: str
    save: bool = False
    restore: int | None = None
    kept: tuple[int, ...] = ()


@dataclass
class _State:
    """All that a Controller remembers, as JSON could hold it."""

    rung: int
    step: int = -1
    moved: int | None = None  # the step of the last move
    quiet_for: int = 0
    dear_steps: int = 0  # above the first rung
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    reference: float | None = None  # lowest running median of the loss
    streaks: list[int] = field(default_factory=list)  # by trigger
    quiet: list[bool | None] = field(default_factory=list)  # when last seen, if ever
    candidate: int | None = None  # a kept state that has yet to prove good
    good: int | None = None
    references: dict[str, float | None] = field(default_factory=dict)  # at the kept states
    rollbacks: int = 0


class Controller:
    """Follows a Policy through one run: ``observe`` after every step.

    Deterministic: the same numbers give the same decisions.  ``state()`` is plain JSON data from
    which ``Controller(policy, state)`` goes on as if nothing had happened.  ``log`` has every move,
    and of refusals in a row (of a spent budget, at the top of the ladder) the first.
    Losses are taken to be positive.  Raises ValueError for a state of another policy.
    """

    def __init__(self, policy: Policy, state: Mapping[str, Any] | None = None) -> None:
        self.policy = policy
        self.log: list[Decision] = []
        self.seen: Mapping[str, float] = {}  # the signals of the last observation, derived ones too
        count = len(policy.triggers)
        self._state = _State(policy.first, streaks=[0] * count, quiet=[None] * count)
        if state is not None:
            if state.get("policy") != _plain(policy):
                raise ValueError(
                    f"state must be of the same policy; got one of {state.get('policy')!r:.100}"
                )
            self._state = _State(**state["now"])
            self.log = [Decision(**{**d, "kept": tuple(d["kept"])}) for d in state["log"]]

    @property
    def rung(self) -> str:
        """The precision for the next step."""
        return self.policy.ladder[self._state.rung]

    @property
    def unseen(self) -> tuple[str, ...]:
        """Signals of triggers that have never been given: a misspelt name, say."""
        pairs = zip(self.policy.triggers, self._state.quiet, strict=True)
        return tuple(trigger.signal for trigger, quiet in pairs if quiet is None)

    def state(self) -> dict[str, Any]:
        """Everything, as plain JSON data."""
        log = [asdict(decision) | {"kept": list(decision.kept)} for decision in self.log]
        now = asdict(self._state)
        return {"policy": _plain(self.policy), "now": now, "log": log}

    def observe(self, step: int, loss: float, grad_norm: float, **signals: float) -> Decision:
        """The decision after step ``step``, from its loss, gradient norm and further signals.

        Signals that a trigger names and that are not given this time (a probe every k steps) leave
        that trigger as it was.  Raises ValueError if ``step`` does not grow or a signal is named as
        a derived one, TypeError for what is no number; then nothing is remembered.
        """
        p, s = self.policy, self._state
        step = as_integer("step", step, "an integer")
        loss, grad_norm = _number("loss", loss), _number("grad_norm", grad_norm)
        signals = {name: _number(name, value) for name, value in signals.items()}
        for name in DERIVED:
            if name in signals:
                raise ValueError(f"{name} is worked out by the controller; got {signals[name]}")
        if step <= s.step:
            raise ValueError(f"step must grow; got {step} after {s.step}")
        elapsed = step - s.step
        s.step = step
        if s.rung > p.first:
            s.dear_steps += elapsed
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        seen = {**signals, **self._derived(loss, grad_norm)} if finite else dict(signals)
        self.seen = seen
        firing = self._firing(seen, step) if finite else []
        if finite:
            self._remember(loss, grad_norm)
        decision = self._decide(step, seen, firing, finite, elapsed)
        if decision.action != "hold" or decision.reason:
            self.log.append(decision)
        return decision

    # ------------------------------------------------------------ signals

    def _derived(self, loss: float, norm: float) -> dict[str, float]:
        """The loss over its lowest running median; the norm over its mean, and over a short mean.

        The short mean is of a fifth of the window.  1 while there is no history.
        """
        s, w = self._state, self.policy.window
        short = s.norms[-max(w // 5, 1) :]
        return {
            "loss_ratio": loss / s.reference if s.reference else 1.0,
            "grad_ratio": _over(norm, s.norms) if len(s.norms) == w else 1.0,
            "grad_jump": _over(norm, short) if len(s.norms) == w else 1.0,
        }

    def _remember(self, loss: float, norm: float) -> None:
        s, w = self._state, self.policy.window
        for history, value in ((s.losses, loss), (s.norms, norm)):
            history.append(value)
            del history[:-w]
        if len(s.losses) == w:
            ordered = sorted(s.losses)
            median = (ordered[(w - 1) // 2] + ordered[w // 2]) / 2
            s.reference = median if s.reference is None else min(s.reference, median)

    def _firing(self, seen: Mapping[str, float], step: int) -> list[int]:
        """Indices of the triggers whose signal has been beyond its level for long enough."""
        s, firing = self._state, []
        for i, trigger in enumerate(self.policy.triggers):
            if trigger.signal not in seen:
                continue
            beyond = step >= self.policy.warmup and trigger.fires(seen[trigger.signal])
            s.streaks[i] = s.streaks[i] + 1 if beyond else 0
            s.quiet[i] = trigger.is_quiet(seen[trigger.signal])
            if s.streaks[i] >= trigger.persist:
                firing.append(i)
        return firing

    # ------------------------------------------------------------ decisions

    def _decide(
        self, step: int, seen: Mapping[str, float], firing: list[int], finite: bool, elapsed: int
    ) -> Decision:
        p, s = self.policy, self._state
        if not finite:
            s.candidate = None
            return self._escalate(step, "loss or gradient norm is not finite", True, True)
        s.quiet_for = 0 if False in s.quiet else s.quiet_for + elapsed
        if firing or not s.quiet_for:  # what was kept last does not prove good
            s.candidate = None
        locked = s.moved is not None and step - s.moved < p.lock
        dear = s.rung > p.first
        if firing and not locked:
            worst = [p.triggers[i] for i in firing]
            reason = ", ".join(
                f"{t.signal} {seen[t.signal]:.3g} is {t.side} {t.level:g}"
                + (f" for {t.persist} observations" if t.persist > 1 else "")
                for t in worst
            )
            back, top = any(t.roll_back for t in worst), any(t.to_top for t in worst)
            return self._escalate(step, reason, back, top)
        if dear and not self._affordable(step, 1):
            return self._move(step, "relax", p.first, f"budget of {p.budget:.0%} is spent")
        if dear and not locked and p.calm is not None and s.quiet_for >= p.calm:
            return self._move(step, "relax", s.rung - 1, f"quiet for {s.quiet_for} steps")
        return self._hold(step, bool(firing))

    def _affordable(self, step: int, more: int) -> bool:
        """Whether ``more`` steps above the first rung stay within the budget all the while."""
        p, s = self.policy, self._state
        since = max(step + 2, p.warmup)  # steps so far, the next one included
        return p.budget is None or s.dear_steps + more <= p.budget * since

    def _escalate(self, step: int, reason: str, back: bool, top: bool) -> Decision:
        p, s = self.policy, self._state
        last = len(p.ladder) - 1
        rung = last if top else min(s.rung + 1, last)
        if not self._affordable(step, 1 if s.rung > p.first else max(p.lock, 1)):
            rung, reason = p.first, f"{reason}; budget of {p.budget:.0%} is spent"
        restore = None
        if back and p.save_every is not None:
            if s.good is None:
                reason += "; no good state to go back to"
            elif s.rollbacks >= p.rollbacks:
                reason += f"; {p.rollbacks} rollbacks are spent"
            else:
                restore, s.candidate = s.good, None
                s.rollbacks += 1
                s.losses, s.norms = [], []  # of a stretch that is undone
                s.reference = s.references[str(restore)]
        if rung == s.rung and restore is None:
            s.quiet_for = 0
            return self._decision(step, "hold", f"{reason}; already at {self.rung}" * self._news())
        action: Action = "roll_back"
        if restore is None:
            action = "escalate" if rung > s.rung else "relax"
        return self._move(step, action, rung, reason, restore)

    def _news(self) -> bool:
        """Whether a refusal is worth a line: the first since the last move."""
        return not self.log or self.log[-1].action != "hold"

    def _move(
        self, step: int, action: Action, rung: int, reason: str, restore: int | None = None
    ) -> Decision:
        s = self._state
        s.rung, s.moved, s.quiet_for = rung, step, 0
        s.streaks = [0] * len(s.streaks)
        return self._decision(step, action, reason, restore=restore)

    def _hold(self, step: int, firing: bool) -> Decision:
        """Nothing to change; now and then a state to keep."""
        p, s = self.policy, self._state
        save = False
        if p.save_every is not None:
            if s.candidate is not None and step - s.candidate >= p.save_every:
                s.good, s.candidate = s.candidate, None
            if s.candidate is None and s.quiet_for and not firing and step + 1 >= p.warmup:
                s.candidate, save = step, True
                s.references[str(step)] = s.reference
        return self._decision(step, "hold", "", save=save)

    def _decision(
        self, step: int, action: Action, reason: str, save: bool = False, restore: int | None = None
    ) -> Decision:
        s = self._state
        kept: Iterable[int | None] = (s.good, s.candidate)
        numbers = tuple(number for number in kept if number is not None)
        s.references = {key: r for key, r in s.references.items() if int(key) in numbers}
        return Decision(step, action, self.rung, reason, save, restore, numbers)


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number; got {value!r}") from None


def _over(value: float, history: list[float]) -> float:
    mean = math.fsum(history) / len(history)
    return value / mean if mean > 0 else 1.0


def _plain(policy: Policy) -> dict[str, Any]:
    values = asdict(policy)
    return values | {"ladder": list(policy.ladder), "triggers": list(values["triggers"])}
