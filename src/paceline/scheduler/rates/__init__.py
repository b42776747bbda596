"""How fast jobs run: alone, on more devices, far apart, and beside neighbours."""
