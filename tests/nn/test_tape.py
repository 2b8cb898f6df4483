"""Recording and replaying choices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from finback.base.runtime import NonFiniteError
from finback.nn.tape import Tape, Trace

PICK = torch.tensor([[1, 2], [3, -1]])


def never() -> Tensor:
    raise AssertionError("a replayed choice was computed")


def test_a_plain_forward_keeps_nothing() -> None:
    """Noted streams of a long run would fill the memory."""
    tape = Tape()
    assert tape.choose("layer0.selected", lambda: PICK) is PICK
    tape.note("layer0.stream", torch.ones(2))
    assert tape.seen == {}


@pytest.mark.parametrize(("options", "noted"), [({"record": True}, False), ({"trace": True}, True)])
def test_record_keeps_choices_and_trace_everything(options: dict[str, bool], noted: bool) -> None:
    """A record must be small enough to keep for every token; a trace is for looking into one forward."""
    tape = Tape(**options)
    tape.choose("layer0.selected", lambda: PICK)
    tape.note("layer0.stream", torch.ones(2, requires_grad=True) * 2)
    assert tape.seen["layer0.selected"].equal(PICK)
    assert ("layer0.stream" in tape.seen) == noted
    if noted:
        assert not tape.seen["layer0.stream"].requires_grad, "a trace must not hold the graph of the forward"


def test_replayed_choices_are_used_and_recorded() -> None:
    """The work of choosing is not done when the choice is given; what is not given is chosen freely."""
    tape = Tape({"layer0.selected": PICK}, record=True)
    assert tape.choose("layer0.selected", never) is PICK
    assert tape.choose("layer1.selected", lambda: PICK + 1).equal(PICK + 1)
    assert tape.seen["layer0.selected"] is PICK and tape.seen["layer1.selected"].equal(PICK + 1)


def test_a_layer_that_runs_again_decides_nothing_anew() -> None:
    """A recomputed block that scored its rows again would do all that work twice, and could break ties differently from
    what its gradients belong to."""
    tape = Tape(once=True)
    assert tape.choose("layer0.selected", lambda: PICK) is PICK
    assert tape.choose("layer0.selected", never) is PICK


def test_a_record_is_a_replay() -> None:
    """What one forward saw can be given to the next as it is."""
    first = Tape(record=True)
    first.choose("layer0.experts", lambda: PICK)
    assert Tape(first.seen).choose("layer0.experts", never) is PICK
    assert Tape(Trace(first.seen)).choose("layer0.experts", never) is PICK


def test_non_finite_scores_name_the_choice() -> None:
    """A kernel knows that its scores are NaN, not whose they are: without a layer's name nobody finds the weight."""

    def fails() -> Tensor:
        raise NonFiniteError("index scores contain NaN")

    with pytest.raises(NonFiniteError, match=r"layer3\.selected: index scores contain NaN"):
        Tape().choose("layer3.selected", fails)
