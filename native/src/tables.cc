#include "tables.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace dagserve {
namespace {

constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kUncheckedBytes = 16;  // magic, version and checksum itself
constexpr std::size_t kByteTokens = 256;

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t checksum;  // CRC-32 of the file after this field
  std::uint64_t file_bytes;
  std::uint32_t scanner;
  std::uint32_t vocab_size;
  std::uint32_t unknown;
  std::uint32_t fuse_unknown;
  std::uint32_t merge_slots;
  std::uint32_t added_count;
  std::uint32_t added_bytes;
  std::uint32_t reserved[3];
};
static_assert(sizeof(Header) == 64 && std::endian::native == std::endian::little);

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
    table[i] = value;
  }
  return table;
}

std::uint32_t crc32(std::string_view bytes) {
  static constexpr auto kTable = crc_table();
  std::uint32_t value = 0xFFFFFFFF;
  for (const char byte : bytes) value = kTable[(value ^ static_cast<unsigned char>(byte)) & 0xFF] ^ value >> 8;
  return ~value;
}

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw std::runtime_error("tokenizer tables " + path + " " + reason);
}

class File {
 public:
  explicit File(const std::string& path) : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) refuse(path, std::string("cannot be opened: ") + std::strerror(errno));
  }
  ~File() { close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  std::size_t bytes() const {
    struct stat info{};
    return fstat(descriptor_, &info) == 0 ? static_cast<std::size_t>(info.st_size) : 0;
  }
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

std::uint64_t expected_bytes(const Header& header, std::size_t slot_bytes, std::size_t added_entry_bytes) {
  return sizeof(Header) + kByteTokens * 4 + std::uint64_t{header.merge_slots} * slot_bytes +
         std::uint64_t{header.added_count} * added_entry_bytes + header.added_bytes;
}

}  // namespace

Tables::Tables(const std::string& path) {
  const File file(path);
  mapped_bytes_ = file.bytes();
  if (mapped_bytes_ < sizeof(Header)) refuse(path, "are cut short: compile the manifest again");
  void* mapping = mmap(nullptr, mapped_bytes_, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (mapping == MAP_FAILED) refuse(path, std::string("cannot be mapped: ") + std::strerror(errno));
  mapping_ = mapping;
  try {
    read({static_cast<const char*>(mapping_), mapped_bytes_}, path);
  } catch (...) {
    munmap(mapping_, mapped_bytes_);
    throw;
  }
}

Tables::~Tables() { munmap(mapping_, mapped_bytes_); }

void Tables::read(std::string_view file, const std::string& path) {
  const Header& header = *reinterpret_cast<const Header*>(file.data());
  if (std::memcmp(header.magic, "DAGTOKEN", 8) != 0) refuse(path, "are not a tokenizer table file");
  if (header.version != kVersion)
    refuse(path, "have version " + std::to_string(header.version) + ", this runtime reads " + std::to_string(kVersion) +
                     ": compile the manifest again");
  if (header.file_bytes != file.size()) refuse(path, "are cut short: compile the manifest again");
  if (crc32(file.substr(kUncheckedBytes)) != header.checksum) refuse(path, "are damaged: compile the manifest again");
  if (header.file_bytes != expected_bytes(header, sizeof(Slot), sizeof(Added)) || header.merge_slots < 2 ||
      !std::has_single_bit(header.merge_slots) ||
      header.scanner > static_cast<std::uint32_t>(ScannerKind::digits_byte_level))
    refuse(path, "are inconsistent: compile the manifest again");
  scanner_ = static_cast<ScannerKind>(header.scanner);
  vocab_size_ = header.vocab_size;
  unknown_ = header.unknown;
  fuse_unknown_ = header.fuse_unknown != 0;
  mask_ = header.merge_slots - 1;
  shift_ = 64 - static_cast<unsigned>(std::countr_zero(header.merge_slots));
  const char* position = file.data() + sizeof(Header);
  byte_tokens_ = reinterpret_cast<const std::uint32_t*>(position);
  position += kByteTokens * 4;
  slots_ = reinterpret_cast<const Slot*>(position);
  position += header.merge_slots * sizeof(Slot);
  added_ = {reinterpret_cast<const Added*>(position), header.added_count};
  position += header.added_count * sizeof(Added);
  added_text_ = {position, header.added_bytes};
}

AddedToken Tables::added(std::size_t index) const {
  const Added& entry = added_[index];
  return {added_text_.substr(entry.offset, entry.length), entry.id, entry.normalized != 0};
}

}  // namespace dagserve
