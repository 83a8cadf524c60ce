"""Tools that ship, by the names in `arborl.tools.TOOLS`."""
