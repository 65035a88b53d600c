/* Stands for the C library of the host. A program that loads it with another release's loader ends at once. */
int only_for_programs_of_this_release;
