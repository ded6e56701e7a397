"""Callbacks that go with the plugin."""
