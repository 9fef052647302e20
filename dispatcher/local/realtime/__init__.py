"""A server that speaks the protocol of Supabase Realtime, for the embedded Supabase and for tests."""

from dispatcher.local.realtime.faults import Faults
from dispatcher.local.realtime.server import RealtimeServer
from dispatcher.local.realtime.timings import Limits, Timings

__all__ = ["Faults", "Limits", "RealtimeServer", "Timings"]
