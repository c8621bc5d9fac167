"""Rules of the tiers, and of time: what tiers answer, finish, lose and hang on to."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.testing.profiles import ModelTier
from kvstrata.testing.rules_base import RuleBase
from kvstrata.testing.scripted import PendingJob, ScriptedTier
from kvstrata.types import FailCause, Flushed, JobEnded, KeysDone, OffloadKey, Presence, ProbeDone

LOAD_CAUSES = tuple(FailCause)
STORE_CAUSES = (FailCause.IO_ERROR, FailCause.NO_SPACE, FailCause.REFUSED, FailCause.TIMEOUT, FailCause.CANCELLED)


class TierRules(RuleBase):
    """What tiers do, and time."""

    # -- time

    def time_small(self) -> None:
        """A few milliseconds, or less."""
        steady = not self.world.profile.faults
        seconds = 0.0005 if steady else self.choices.pick((0.001, 0.01, 0.05, 0.3))
        self._advance("time small", seconds)

    def time_large(self) -> None:
        """Clocks run out, jobs become overdue."""
        self._advance("time large", self.choices.pick((1.0, 2.5, 4.0, 11.0)))

    def silence(self) -> None:
        """Nobody polls for longer than a request may be silent."""
        self._advance("silence", self.choices.pick((31.0, 45.0, 70.0, 200.0)))

    # -- tiers

    def hand_over(self) -> None:
        """Commands go out."""
        self.world.hand_over()

    def deliver(self) -> None:
        """What one tier reports comes in."""
        if self.world.tiers:
            self.world.deliver(self.choices.below(len(self.world.tiers)))

    def settle(self) -> None:
        """Events and commands are carried until neither is left."""
        self.world.settle()

    def tier_works(self) -> None:
        """A healthy tier ends everything that it was given."""
        tier = self._tier()
        if tier is not None:
            finish_all(tier)

    def tier_probe(self) -> None:
        """A probe is answered: truly, with "being written", with an error, or never."""
        tier, choices = self._tier(), self.choices
        if tier is None or not tier.probes:
            return
        probe = choices.pick(tier.probes)
        match choices.below(8) if self.world.profile.faults else 0:
            case 5:
                probe.finish(dict.fromkeys(choices.some(probe.keys), Presence.UNKNOWN))
            case 6:
                probe.finish(error=choices.pick((FailCause.IO_ERROR, FailCause.TIMEOUT)))
            case 7:
                probe.lose()
                self.world.lost_probes.append((tier, probe.ticket, len(probe.keys)))
            case _:
                probe.finish()

    def tier_load(self) -> None:
        """A load makes progress or ends: wholly, partly, failed for any cause, cancelled, later, or never."""
        tier = self._tier()
        if tier is not None and tier.loads:
            self._job(self.choices.pick(tier.loads), LOAD_CAUSES)

    def tier_store(self) -> None:
        """The same for a cascade."""
        tier = self._tier()
        if tier is not None and tier.stores:
            self._job(self.choices.pick(tier.stores), STORE_CAUSES)

    def late_job(self) -> None:
        """A job that seemed to hang for ever goes on after all."""
        if self.world.lost:
            job = self.world.lost.pop(self.choices.below(len(self.world.lost)))
            self._job(job, LOAD_CAUSES if job.is_load else STORE_CAUSES)

    def _job(self, job: PendingJob, causes: Sequence[FailCause]) -> None:
        choices = self.choices
        rest = [i for i in range(len(job.job.keys)) if i not in job.reported]
        movable = [i for i in rest if not job.is_load or job.job.keys[i] in job.tier.held]
        match choices.below(7) if self.world.profile.faults else choices.below(3):
            case 0:
                job.finish()
            case 1:
                job.progress(choices.some(movable))
                self._keep(job)
            case 2:
                for i in reversed(movable):
                    job.progress([i])
                job.finish()
            case 3:
                job.finish(failed={i: choices.pick(causes) for i in choices.some(rest)})
            case 4:
                job.progress(failed={i: choices.pick(causes) for i in choices.some(rest)})
                self._keep(job)
            case 5:
                job.fail(FailCause.CANCELLED if job.cancelled else choices.pick(causes))
            case 6:
                job.lose()
                self.world.lost.append(job)

    def _keep(self, job: PendingJob) -> None:
        """A job that is not ended, and that the tier does not list any more, is still there."""
        if job not in job.tier.loads and job not in job.tier.stores:
            self.world.lost.append(job)

    def scribble(self) -> None:
        """A tier writes rubbish where an unfinished load allows it to."""
        jobs = [job for tier in self.world.scripted for job in tier.loads]
        jobs += [job for job in self.world.lost if job.is_load]
        for job in jobs:
            for i, (offset, length) in enumerate(zip(job.job.offsets, job.job.lengths, strict=True)):
                if i not in job.done:
                    self.world.stack.region[offset : offset + length] = b"\xbb" * length

    def twice(self) -> None:
        """An event that was delivered comes again."""
        if self.world.sent:
            tier, event = self.choices.pick(self.world.sent)
            if isinstance(event, KeysDone | JobEnded | ProbeDone):
                self.world.coverage.note("events delivered twice")
                self.world.tell(tier, event)

    def fill(self) -> None:
        """Tiers hold something from the start."""
        for tier in self.world.scripted:
            for _ in range(self.choices.below(4)):
                self._put(tier)

    def tier_put(self) -> None:
        """Somebody else has stored the chunks of a prompt into a tier: all, or with holes."""
        tier = self._tier()
        if tier is not None:
            self._put(tier)

    def _put(self, tier: ScriptedTier) -> None:
        choices = self.choices
        path = self.world.fork(choices, "x")
        whole = choices.below(3) < 2
        self._put_keys(tier, [keys if whole else choices.some(keys) for keys in self.world.keys_of(path, 60)])
        self.world.program.append(f"put {path} into {tier.name}{'' if whole else ', with holes'}")

    def _put_keys(self, tier: ScriptedTier, by_group: Sequence[Sequence[OffloadKey]]) -> None:
        for keys, size in zip(by_group, self.world.layout.chunk_bytes, strict=True):
            for key in keys:
                if key not in tier.held:
                    payload = self.world.new_payload(key, size)
                    self.world.valid.setdefault(key, set()).add(payload)
                    tier.held[key] = payload

    def tier_loses(self) -> None:
        """A tier evicts keys, and tells or does not."""
        tier = self._tier()
        if tier is None or not tier.held:
            return
        gone = self.choices.some(tier.held)
        self.world.program.append(f"{tier.name} loses {len(gone)} keys")
        if self.choices.below(2):
            tier.lose_keys(gone)
        else:
            for key in gone:
                del tier.held[key]
        self.world.strike_all("tier lost keys")

    def tier_writing(self) -> None:
        """A tier is itself still writing some keys."""
        tier, request = self._tier(), self._any()
        if tier is not None:
            keys = [key for group in request.keys for key in group] if request is not None else []
            tier.writing = set() if self.choices.below(2) else set(self.choices.some(keys))

    def purge_durable(self) -> None:
        """A purge becomes durable, or fails."""
        for tier in self.world.scripted:
            if isinstance(tier, ModelTier) and tier.purging:
                tier.emit(Flushed(tier.purging.pop(0), self.choices.below(3) != 2))


def finish_all(tier: ScriptedTier) -> None:
    """The tier answers all probes and ends all jobs, well."""
    for probe in list(tier.probes):
        probe.finish()
    for job in [*tier.loads, *tier.stores]:
        job.finish()
