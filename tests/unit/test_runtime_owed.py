"""Facts that were not taken: in order for each subject, paced, bounded."""

from __future__ import annotations

from kvstrata.runtime.owed import Owed


class Listener:
    """Takes what it is told, but for the facts in `deaf_to`."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.deaf_to: set[str] = set()
        self.tries = 0

    def hear(self, fact: str) -> None:
        self.tries += 1
        if fact in self.deaf_to:
            raise RuntimeError(fact)
        self.heard.append(fact)


def owed(listener: Listener, *facts: tuple[str, str], most: int = 10) -> Owed:
    made = Owed(retry_s=1.0, most=most)
    for subject, fact in facts:
        made.add(subject, lambda fact=fact: listener.hear(fact), 10.0)
    return made


def test_one_that_stays_untold_holds_up_its_own_subject_only() -> None:
    listener = Listener()
    listener.deaf_to = {"a1"}
    facts = owed(listener, ("a", "a1"), ("b", "b1"), ("a", "a2"), ("b", "b2"))
    facts.tell(11.0)
    assert listener.heard == ["b1", "b2"]
    assert (facts.holds("a"), facts.holds("b"), len(facts)) == (True, False, 2)
    listener.deaf_to = set()
    facts.tell(12.0)
    assert listener.heard == ["b1", "b2", "a1", "a2"]
    assert (len(facts), facts.due) == (0, None)


def test_they_are_told_at_a_pace() -> None:
    listener = Listener()
    listener.deaf_to = {"a1"}
    facts = owed(listener, ("a", "a1"))
    for now in (10.5, 11.0, 11.5, 11.9, 12.0):
        facts.tell(now)
    assert listener.tries == 2
    assert facts.due == 13.0


def test_the_oldest_is_forgotten_when_there_are_too_many() -> None:
    listener = Listener()
    facts = owed(listener, ("a", "a1"), ("b", "b1"), ("c", "c1"), most=2)
    assert (facts.holds("a"), len(facts)) == (False, 2)
    facts.tell(11.0)
    assert listener.heard == ["b1", "c1"]
