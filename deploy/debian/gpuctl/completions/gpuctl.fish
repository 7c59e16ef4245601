complete --keep-order --exclusive --command gpuctl --arguments "(GPUCTL_COMPLETE=fish gpuctl -- (commandline --current-process --tokenize --cut-at-cursor) (commandline --current-token))"
