"""Parts of drafters that model plugins share. Needs torch; import the module you need."""
