"""Studies that combine the other packages: the demo, predictions, calibration, fault campaigns."""
