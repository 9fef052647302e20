"""OpenClaw as a neighbour: is its Gateway ready, what runs in a session, abort, background tasks."""
