"""Parts that all commands share: progress bars, arguments, stopping, and files that are complete or absent."""
