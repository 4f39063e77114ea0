"""Per-request state: allocation from declared layouts, page pool, request table. Needs torch; import the module you need."""
