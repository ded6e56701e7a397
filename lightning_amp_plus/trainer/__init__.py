"""The adapters to Lightning: the plugin, the seam, the fallback callback."""
