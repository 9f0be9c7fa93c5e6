"""Programs for clients, drawn by Hypothesis: for those who would have it choose, remember and shrink them.

Needs the extra ``testing``::

    @given(client_programs())
    def test_any_program(program):
        trio.run(functools.partial(run_client_program, make, program))
"""

from __future__ import annotations

from hypothesis import strategies as st

from .operations import Program, draw_program

__all__ = ["client_programs"]


def client_programs(*, operations: int = 12, sessions: bool = False, bad_inputs: int = 0) -> st.SearchStrategy[Program]:
    """Programs for `run_client_program`.

    Args:
        operations: the longest program.
        sessions: whether the client takes input in pieces (``session=...``).
        bad_inputs: how many inputs are given that it can not use (``bad_inputs=...``).
    """
    chance = st.randoms(use_true_random=False)
    return st.builds(
        draw_program, chance, st.just(operations), sessions=st.just(sessions), refusals=st.just(bad_inputs)
    )
