#include "section_file.h"

#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace dagserve {
namespace {

constexpr std::size_t kUncheckedBytes = 16;  // magic, version and checksum itself

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t checksum;  // CRC-32 of the file after this field
  std::uint64_t file_bytes;
  std::uint32_t sections;
  std::uint32_t reserved[9];
};
struct Entry {
  std::uint64_t offset, bytes;
};
static_assert(sizeof(Header) == 64 && std::endian::native == std::endian::little);

// Eight tables, so that eight bytes take one step ("slicing by 8").
using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr CrcTables crc_tables() {
  CrcTables tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
    tables[0][i] = value;
  }
  for (std::size_t table = 1; table < 8; ++table)
    for (std::size_t i = 0; i < 256; ++i)
      tables[table][i] = tables[0][tables[table - 1][i] & 0xFF] ^ tables[table - 1][i] >> 8;
  return tables;
}

std::uint32_t crc32(std::string_view bytes) {
  static constexpr CrcTables kTables = crc_tables();
  std::uint32_t value = 0xFFFFFFFF;
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), 8);
    word ^= value;
    value = 0;
    for (std::size_t i = 0; i < 8; ++i) value ^= kTables[7 - i][word >> 8 * i & 0xFF];
  }
  for (const char byte : bytes) value = kTables[0][(value ^ static_cast<unsigned char>(byte)) & 0xFF] ^ value >> 8;
  return ~value;
}

}  // namespace

SectionFile::SectionFile(const std::string& path, std::string_view magic, std::uint32_t version, const char* what)
    : path_(path), what_(what), file_(path) {
  if (file_.size() < sizeof(Header)) refuse("are cut short: compile the manifest again");
  const std::string_view file(reinterpret_cast<const char*>(file_.data()), file_.size());
  const Header& header = *reinterpret_cast<const Header*>(file.data());
  if (std::string_view(header.magic, sizeof(header.magic)) != magic) refuse("are not a file of " + std::string(what_));
  if (header.version != version)
    refuse("have version " + std::to_string(header.version) + ", this runtime reads " + std::to_string(version) +
           ": compile the manifest again");
  if (header.file_bytes != file.size()) refuse("are cut short: compile the manifest again");
  if (crc32(file.substr(kUncheckedBytes)) != header.checksum) refuse("are damaged: compile the manifest again");
}

std::string_view SectionFile::section(std::size_t index) const {
  const char* file = reinterpret_cast<const char*>(file_.data());
  const Header& header = *reinterpret_cast<const Header*>(file);
  if (index >= header.sections || sizeof(Header) + header.sections * sizeof(Entry) > file_.size())
    refuse("lack a section: compile the manifest again");
  const Entry& entry = reinterpret_cast<const Entry*>(file + sizeof(Header))[index];
  if (entry.offset > file_.size() || entry.bytes > file_.size() - entry.offset)
    refuse("are inconsistent: compile the manifest again");
  return {file + entry.offset, entry.bytes};
}

void SectionFile::refuse(const std::string& reason) const {
  throw std::runtime_error(std::string(what_) + " " + path_ + " " + reason);
}

}  // namespace dagserve
