"""Public test tools. `netns`: real hosts in network namespaces on one machine."""
