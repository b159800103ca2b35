"""What all rooms use and what uses none of them: words in messages, sizes, names, the job."""
