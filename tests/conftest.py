"""Fixtures that every test folder shares."""
