"""One file per framework: each turns what an unchanged program does into events."""
