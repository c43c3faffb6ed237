// What the user says with --data and --val-data, turned into lists of files.
//
// An argument is a file, a Megatron name, a glob, or one of them with a mixture weight, PATH:WEIGHT. Everything that can be wrong with the list
// itself (a weight, a file named twice, a validation file that is also trained on) is found here, before a file is opened.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kinoe {

/// One argument. weight is 0 where none was given.
struct DataSpec {
  std::string path;
  double weight = 0;
};

/// The files that share one order and one count of epochs.
struct DataSource {
  std::string name;  // the argument's path; of an unweighted list, its first path and how many follow
  double weight = 1;
  std::vector<std::string> files;
};

/// Splits at the last colon if a number follows it (and what is before it, not the whole, names a file, if any does). A weight that is zero, negative, infinite, NaN or (behind the
/// name of an existing file or a glob that matches) no number is a usage error.
DataSpec parse_data_argument(std::string_view argument);

/// Expands globs (sorted by name); a Megatron data set, named by NAME, NAME.bin or NAME.idx, becomes NAME.bin. Without weights all files form one source; with weights every argument is one,
/// and every argument needs one. No match, a directory or anything but a regular file is a data error; the same file
/// (device and inode) named twice is a usage error.
std::vector<DataSource> expand_data(const std::vector<DataSpec>& specs);
std::vector<DataSource> expand_data(const std::vector<std::string>& arguments);

/// Usage error if a file of `validation` is also in `training`.
void check_validation_apart(const std::vector<DataSource>& training,
                            const std::vector<DataSource>& validation);

}  // namespace kinoe
