"""The pairwise selection of the test matrix leaves no possible pair out."""

from __future__ import annotations

import itertools

from tests.parity.matrix import combinations, pairwise

FACTORS = {
    "model": ("gpt-tied", "llama", "bert"),
    "zero_stage": (0, 1, 2, 3),
    "layout": ("dp2", "hybrid2x2"),
    "accumulate": (1, 4),
    "clipping": ("unclipped", "clip_norm", "clip_value"),
}


def pairs_in(rows: list) -> set:
    return {
        (a, getattr(row, a), b, getattr(row, b)) for row in rows for a, b in itertools.combinations(sorted(FACTORS), 2)
    }


def test_every_possible_pair_is_chosen_from_a_fraction_of_all_combinations() -> None:
    everything, chosen = combinations(**FACTORS), pairwise(**FACTORS)
    assert pairs_in(chosen) == pairs_in(everything)
    assert len(chosen) < len(everything) / 5
    assert len(set(chosen)) == len(chosen)


def test_unsharded_copies_are_not_hybrid() -> None:
    assert all(row.zero_stage > 0 for row in combinations(**FACTORS) if row.layout == "hybrid2x2")
    assert any(row.zero_stage == 0 for row in combinations(**FACTORS))
