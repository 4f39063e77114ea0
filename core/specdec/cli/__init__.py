"""The ``specdec`` command. Modules here import the declaration layer only; torch is imported inside command bodies."""
