// A file mapped read-only and shared, closed with its owner.
#pragma once

#include <cstddef>
#include <string>

namespace dagserve {

class MappedFile {
 public:
  // Throws std::runtime_error when the file is missing, unreadable, or not of `expected` bytes (-1: any size).
  explicit MappedFile(const std::string& path, long long expected = -1);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace dagserve
