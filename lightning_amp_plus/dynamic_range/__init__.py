"""DynamicRangeMonitor: which magnitudes pass through each module of a model."""
