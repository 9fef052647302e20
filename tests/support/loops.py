"""The end of an event loop that runs in a thread of a test's helper."""

import asyncio
import threading

# What was accepted or aborted a moment ago takes a turn or two of the loop to become a task, or to be gone.
TURNS = 5
ROUNDS = 3
DEADLINE = 10.0


def end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, server: asyncio.Server | None) -> None:
    """Ends all that runs in the loop, then the loop: what it left open would be found, and told, in some later test."""
    asyncio.run_coroutine_threadsafe(_end_all(loop, server), loop).result(DEADLINE)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(DEADLINE)
    loop.close()


async def _end_all(loop: asyncio.AbstractEventLoop, server: asyncio.Server | None) -> None:
    if server is not None:
        server.close()
    # A connection accepted at this moment makes its task and its transport a turn later, one with TLS two.
    for _ in range(ROUNDS):
        await _take_turns()
        others = asyncio.all_tasks(loop) - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # The loop's own table: also those no task of ours knows, or that wait for a peer to read their last bytes.
        for transport in list(getattr(loop, "_transports", {}).values()):
            transport.abort()
    await _take_turns()


async def _take_turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)
