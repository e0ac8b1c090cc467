"""How much of the gate callers may take who have not proven who they are."""

import asyncio

from potluck.flower.deploy.limits import WaitingRoom


def test_of_more_callers_than_places_those_who_came_first_have_to_go():
    async def who_may_stay(places, callers):
        room = WaitingRoom(places)
        waiting = [asyncio.create_task(asyncio.sleep(60)) for _ in range(callers)]
        for caller in waiting:
            room.enter(caller)
        await asyncio.sleep(0)
        stayed = [not caller.cancelling() for caller in waiting]
        for caller in waiting:
            caller.cancel()
        return stayed

    assert asyncio.run(who_may_stay(places=3, callers=3)) == [True] * 3
    assert asyncio.run(who_may_stay(places=3, callers=5)) == [False, False, True, True, True]


def test_who_has_left_makes_room_for_another():
    async def stays():
        room = WaitingRoom(1)
        first, second = (asyncio.create_task(asyncio.sleep(60)) for _ in range(2))
        room.enter(first)
        room.leave(first)
        room.enter(second)
        stayed = not first.cancelling() and not second.cancelling()
        for caller in (first, second):
            caller.cancel()
        return stayed

    assert asyncio.run(stays())
