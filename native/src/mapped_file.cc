#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace dagserve {

MappedFile::MappedFile(const std::string& path, long long expected) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw std::runtime_error("[load] cannot open " + path + ": " + std::strerror(errno));
  struct stat status = {};
  const bool known = fstat(file, &status) == 0;
  size_ = static_cast<std::size_t>(status.st_size);
  const bool right = known && (expected < 0 || status.st_size == expected);
  void* mapped = right && size_ > 0 ? mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0) : nullptr;
  close(file);
  if (!right) {
    throw std::runtime_error("[load] " + path + " has " + std::to_string(size_) + " bytes, not the " +
                             std::to_string(expected) + " of the plan; compile the manifest again");
  }
  if (mapped == MAP_FAILED) throw std::runtime_error("[load] cannot map " + path + ": " + std::strerror(errno));
  data_ = static_cast<std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace dagserve
