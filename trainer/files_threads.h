// Reading by several threads: a disk gives its full rate to many requests at once, and one core checks slower than it reads.
#pragma once

#include <cstddef>
#include <functional>

namespace kinoe {

/// Threads that read for one of `sharing` ranks on this machine: its share of the cores, 2 at least (one reads while the other
/// checks), 8 at most.
int reading_threads(int sharing);

/// Calls work(thread, i) for every i < count on `threads` threads, of which the calling one is thread 0. The i are begun in order.
/// After a failure none is begun, those before it are ended: thrown is the failure of the lowest i, however the threads ran.
void share_out(int threads, size_t count, const std::function<void(int, size_t)>& work);

}  // namespace kinoe
