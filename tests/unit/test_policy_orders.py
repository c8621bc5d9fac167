"""What LRU and S3-FIFO evict first, the registry and admission."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from kvstrata.errors import ConfigError
from kvstrata.policy.admission import ThresholdAdmission
from kvstrata.policy.lru import LRU
from kvstrata.policy.registry import make_policy, policy_names, register_policy
from kvstrata.policy.s3fifo import S3FIFO


def keys(*slots: int) -> list[bytes]:
    return [b"key %d" % slot for slot in slots]


class TestLRU:
    def test_the_oldest_use_goes_first(self) -> None:
        policy = LRU()
        policy.insert([1, 2])
        policy.insert([3, 4])
        policy.insert([5])
        policy.touch([1, 2])
        assert list(policy.victims()) == [4, 3, 5, 2, 1]

    def test_equals_an_ordered_dict_for_single_chunks(self) -> None:
        rng = np.random.default_rng(3)
        policy, twin = LRU(), OrderedDict[int, None]()
        for _ in range(2000):
            slot = int(rng.integers(0, 60))
            if slot not in twin:
                policy.insert([slot])
            elif rng.integers(0, 3):
                policy.touch([slot])
                twin.move_to_end(slot)
            else:
                policy.remove([slot])
                del twin[slot]
                continue
            twin[slot] = None
            assert list(policy.victims()) == list(twin)

    def test_a_shared_head_stays_while_anything_descends_from_it_and_keeps_its_own_age(self) -> None:
        policy = LRU()
        policy.insert([1])
        policy.insert([2], 1)
        policy.insert([3], 1)
        policy.insert([9])
        assert list(policy.victims()) == [2, 3, 1, 9]
        policy.touch([1])
        assert list(policy.victims()) == [2, 3, 9, 1]

    def test_protected_heads_are_walked_over_once(self) -> None:
        policy = LRU()
        policy.insert(list(range(100)))
        policy.touch([99])  # the tail is hot now, everything above it old and protected
        assert next(policy.victims()) == 99
        policy.insert([200])
        assert list(policy.victims())[:3] == [99, 98, 97]

    def test_hidden_slots_come_back_as_the_coldest(self) -> None:
        policy = LRU()
        for slot in (1, 2, 3, 4):
            policy.insert([slot])
        policy.hide([1, 2])
        assert list(policy.victims()) == [3, 4]
        policy.show([2])
        assert list(policy.victims()) == [2, 3, 4]
        policy.touch([1])
        assert list(policy.victims()) == [2, 3, 4, 1]

    def test_a_protected_head_that_is_hidden_waits_again_when_shown(self) -> None:
        policy = LRU()
        policy.insert([1, 2])
        policy.touch([2])
        assert list(policy.victims()) == [2, 1]  # 1 is parked below its child
        policy.hide([1])
        policy.show([1])
        assert list(policy.victims()) == [2, 1]
        policy.remove([1])
        assert list(policy.victims()) == [2]


class TestS3FIFO:
    def test_what_is_used_once_does_not_push_out_what_is_used(self) -> None:
        policy = S3FIFO()
        for slot in range(10):
            policy.insert([slot], keys=keys(slot))
            policy.touch([slot])
        for slot in range(10, 20):
            policy.insert([slot], keys=keys(slot))
        order = list(policy.victims())
        assert order[:8] == [10, 11, 12, 13, 14, 15, 16, 17]
        assert set(order) == set(range(20))

    def test_an_evicted_key_that_returns_enters_the_main_queue(self) -> None:
        policy = S3FIFO()
        policy.insert([1], keys=keys(1))
        policy.insert([2], keys=keys(2))
        policy.evicted([1])
        assert policy.ghosts == 1
        policy.insert([3], keys=keys(1))
        policy.insert([4], keys=keys(4))
        assert policy.ghosts == 0
        assert list(policy.victims()) == [2, 4, 3]

    def test_ghosts_are_bounded_by_what_is_held(self) -> None:
        policy = S3FIFO()
        policy.insert([0], keys=keys(0))
        for turn in range(1, 200):
            policy.insert([1], keys=keys(turn))
            policy.evicted([1])
        assert policy.ghosts <= 16

    def test_what_is_removed_or_leaves_main_is_no_ghost(self) -> None:
        policy = S3FIFO()
        policy.insert([1], keys=keys(1))
        policy.remove([1])
        policy.insert([2], keys=keys(2))
        policy.touch([2])
        assert list(policy.victims()) == [2]
        policy.evicted([2])
        assert policy.ghosts == 0

    def test_main_is_a_clock(self) -> None:
        policy = S3FIFO(small_share=0.5)
        for slot in (1, 2, 3):
            policy.insert([slot], keys=keys(slot))
            policy.touch([slot])
        list(policy.victims())  # all move to main, uses cleared
        policy.touch([1])
        assert list(policy.victims()) == [2, 3, 1]

    def test_uses_are_capped(self) -> None:
        policy = S3FIFO()
        policy.insert([1])
        policy.insert([2])
        for _ in range(50):
            policy.touch([1])
        assert list(policy.victims()) == [2, 1]

    def test_works_without_keys(self) -> None:
        policy = S3FIFO()
        policy.insert([1, 2])
        policy.evicted([2])
        assert policy.ghosts == 0

    @pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
    def test_a_share_that_makes_no_sense_is_refused(self, share: float) -> None:
        with pytest.raises(ConfigError, match="small_share"):
            S3FIFO(share)

    def test_fresh_keeps_the_settings(self) -> None:
        policy = S3FIFO(small_share=0.9).fresh()
        for slot in (1, 2, 3):
            policy.insert([slot])
        policy.touch([1])
        assert next(policy.victims()) == 1


class TestRegistry:
    def test_makes_policies_by_name(self) -> None:
        assert policy_names() == ("lru", "s3fifo")
        assert isinstance(make_policy("lru"), LRU)
        assert isinstance(make_policy("s3fifo"), S3FIFO)

    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match="'arc'; known: lru, s3fifo"):
            make_policy("arc")

    def test_takes_policies_from_outside_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvstrata.policy.registry._FACTORIES", {"lru": LRU})
        register_policy("mine", lambda: S3FIFO(0.2))
        assert isinstance(make_policy("mine"), S3FIFO)
        with pytest.raises(ConfigError, match="'mine' is registered"):
            register_policy("mine", LRU)


class TestAdmission:
    def test_admits_everything_by_default_and_remembers_nothing(self) -> None:
        rule = ThresholdAdmission()
        assert rule.admit(keys(1, 2)).tolist() == [True, True]
        assert rule.statistics().remembered == 0
        assert (rule.statistics().admitted, rule.statistics().rejected) == (2, 0)

    def test_admits_from_the_threshold_on_and_counts_rejections(self) -> None:
        rule = ThresholdAdmission(threshold=3)
        assert rule.admit(keys(1, 2, 1, 1)).tolist() == [False, False, False, True]
        assert rule.admit(keys(1, 2, 2)).tolist() == [True, False, True]
        statistics = rule.statistics()
        assert (statistics.admitted, statistics.rejected, statistics.remembered) == (3, 4, 2)

    def test_memory_is_bounded_and_what_keeps_coming_is_kept(self) -> None:
        rule = ThresholdAdmission(threshold=2, capacity=10)
        rule.admit(keys(0))
        for number in range(1, 500):
            rule.admit(keys(number))
            assert rule.admit(keys(0)).tolist() == [True]
            assert rule.statistics().remembered <= 20

    @pytest.mark.parametrize(("threshold", "capacity", "what"), [(0, 10, "threshold"), (1, 0, "capacity")])
    def test_bad_settings_are_refused(self, threshold: int, capacity: int, what: str) -> None:
        with pytest.raises(ConfigError, match=what):
            ThresholdAdmission(threshold, capacity)
