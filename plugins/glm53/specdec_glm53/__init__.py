"""GLM-5.3-Flash for specdec: the target and the MTP drafter embedded in its checkpoint. Importing this loads nothing."""
