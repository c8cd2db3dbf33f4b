// SPDX-License-Identifier: Apache-2.0
#pragma once

// The only place that uses Eigen::internal: float registers of the target machine.

#include <Eigen/Core>

#include <cstdint>

namespace kvtrim::detail {

using Eigen::internal::padd;
using Eigen::internal::pexp;
using Eigen::internal::pload;
using Eigen::internal::ploadu;
using Eigen::internal::pmadd;
using Eigen::internal::pmax;
using Eigen::internal::pmul;
using Eigen::internal::predux;
using Eigen::internal::predux_max;
using Eigen::internal::pset1;
using Eigen::internal::pstore;
using Eigen::internal::pstoreu;
using Eigen::internal::psub;
using Eigen::internal::ptranspose;

using Packet = Eigen::internal::packet_traits<float>::type;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored \
    "-Wignored-attributes"  // g++ means the alignment, which Packet has anyway
using PacketSquare =
    Eigen::internal::PacketBlock<Packet, Eigen::internal::packet_traits<float>::size>;
#pragma GCC diagnostic pop

/// Floats per packet.
inline constexpr std::int32_t packet_floats = Eigen::internal::packet_traits<float>::size;
/// Number of registers that hold floats.
inline constexpr std::int32_t packet_registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS;
/// Whether multiply and add are one instruction.
#ifdef EIGEN_HAS_SINGLE_INSTRUCTION_MADD
inline constexpr bool fused_multiply_add = true;
#else
inline constexpr bool fused_multiply_add = false;
#endif

/// tanh of each float.
[[nodiscard]] inline Packet ptanh_fast(const Packet& x) noexcept {
  return Eigen::internal::generic_fast_tanh_float(x);
}

}  // namespace kvtrim::detail
