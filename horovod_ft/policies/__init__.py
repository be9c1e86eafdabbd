"""One file a policy. Others are found by the entry point ``horovod_ft.policies``."""
