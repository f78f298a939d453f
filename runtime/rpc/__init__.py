"""Frames, codec, server and client of the msgpack RPC."""
