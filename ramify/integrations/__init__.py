"""Ramify inside other people's programs: each module needs the package that it is named after."""
