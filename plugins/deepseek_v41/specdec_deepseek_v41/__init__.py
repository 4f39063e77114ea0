"""DeepSeek-V4.1-Flash for specdec: the target and the DSpark drafter embedded in its checkpoint. Importing this loads nothing."""
