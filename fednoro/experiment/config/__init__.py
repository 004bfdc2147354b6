"""What a run is made of: presets, files and overrides, checked."""
