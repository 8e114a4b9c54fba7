// A file of sections, memory-mapped and checked: what dagserve/sections.py writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "mapped_file.h"

namespace dagserve {

class SectionFile {
 public:
  // `magic` has 8 bytes; `what` names such files in messages, as a plural. Throws std::runtime_error: the file cannot
  // be read, or is damaged, of another kind or of another version.
  SectionFile(const std::string& path, std::string_view magic, std::uint32_t version, const char* what);

  // Throws std::runtime_error where there is none, as array() does.
  std::string_view section(std::size_t index) const;
  template <class T>
  std::span<const T> array(std::size_t index) const {
    const std::string_view bytes = section(index);
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  // Throws std::runtime_error: the file by name, and the reason.
  [[noreturn]] void refuse(const std::string& reason) const;

 private:
  std::string path_;
  const char* what_;
  MappedFile file_;
};

}  // namespace dagserve
