"""Work is plain data: it survives a wire, and nothing in it is callable or compared by identity."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings

from ramify import Request
from ramify.engine.plan import Work
from tests.fake import FakeDevice
from tests.unit.test_engine import Setting, engine_for, worlds


@given(world=worlds())
@settings(max_examples=20, deadline=None)
def test_work_of_any_schedule_survives_a_wire(world: Setting) -> None:
    engine = engine_for(world)
    for number, (prompt, params, priority) in enumerate(world.requests):
        engine.add_request(Request(str(number), None, prompt, params, priority=priority))
    device = engine.device
    assert isinstance(device, FakeDevice)
    while engine.has_unfinished():
        engine.step()
    for plan in device.plans:
        for work in plan.works:
            wire = msgspec.msgpack.encode(work)
            back = msgspec.msgpack.decode(wire, type=Work)
            assert msgspec.msgpack.encode(back) == wire
            assert [tuple(chunk.token_ids) for chunk in back.chunks] == [
                tuple(chunk.token_ids) for chunk in work.chunks
            ]
            assert [chunk[1:] for chunk in back.chunks] == [chunk[1:] for chunk in work.chunks]
            assert (back.shared, back.copies, back.late_copies) == (work.shared, work.copies, work.late_copies)
            assert (back.swaps_out, back.swaps_in) == (work.swaps_out, work.swaps_in)
