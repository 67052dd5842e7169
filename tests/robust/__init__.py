"""Tests of `offbeat.robust`."""
