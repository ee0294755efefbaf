// Spark's Thrift server behind a door of Kiln's own: who comes in, how many, with which settings, and what they learn of errors.
package kiln

import java.io.{DataInputStream, DataOutputStream, IOException}
import java.lang.reflect.{InvocationTargetException, Proxy}
import java.net.{InetAddress, InetSocketAddress, Socket}
import java.nio.charset.StandardCharsets.UTF_8
import java.security.MessageDigest
import java.util.concurrent.{SynchronousQueue, ThreadPoolExecutor, TimeUnit}

import scala.collection.mutable
import scala.jdk.CollectionConverters._

import org.apache.hive.service.cli.CLIService
import org.apache.hive.service.cli.thrift.ThriftBinaryCLIService
import org.apache.hive.service.rpc.thrift._
import org.apache.thrift.protocol.TBinaryProtocol
import org.apache.thrift.server.TThreadPoolServer
import org.apache.thrift.transport._
import org.apache.thrift.transport.TServerSocket.ServerSocketTransportArgs
import org.apache.thrift.transport.layered.TFramedTransport

import org.apache.spark.internal.Logging

/** The one user, and the SHA-256 of the password as it is now. */
class Login(val user: String, @volatile var password: Array[Byte]) {
  /** Takes a time that does not depend on where the texts differ. */
  def admits(name: String, word: String): Boolean =
    MessageDigest.isEqual(Login.digest(name), Login.digest(user)) & MessageDigest.isEqual(Login.digest(word), password)
}

object Login {
  def digest(text: String): Array[Byte] = MessageDigest.getInstance("SHA-256").digest(text.getBytes(UTF_8))
}

object Door {
  val MostNew = 100 // connections that have not logged in
  val MostWrong = 200 // answers to a wrong password that wait, and 150 of them from one address
  val MostWrongOfOne = 150
  val MostClients = 100 // connections that have logged in
  val LoginSeconds = 10
  val LongestWait = 5 // s, before a wrong password is answered
  val LargestLogin = 4096 // bytes of a message of SASL
  val LargestMessage = 16 << 20 // bytes of a message of Thrift
}

/** Accepts connections. When too many have not logged in, the oldest of the address with the most goes; so a client that logs in at once
  * comes in however many others are silent. A wrong password is answered late, and keeps its place until then, even if the peer goes. */
class Door(address: InetSocketAddress, login: Login)
    extends TServerSocket(new ServerSocketTransportArgs().bindAddr(address).backlog(256))
    with Logging {
  import Door._

  /** One connection. */
  final class Visitor(socket: Socket) extends TSocket(socket) {
    val from: InetAddress = socket.getInetAddress
    private val since = System.nanoTime()

    /** The connection after the login; made when the server's thread first wants it. */
    lazy val session: TTransport = logIn(this)

    def isLate: Boolean = System.nanoTime() - since > TimeUnit.SECONDS.toNanos(LoginSeconds)
    override def close(): Unit = {
      Door.this.synchronized { fresh -= this; clients -= this }
      super.close()
    }
  }

  // guarded by `synchronized`
  private val fresh = mutable.LinkedHashSet[Visitor]() // oldest first
  private val wrong = mutable.HashSet[Visitor]()
  private val clients = mutable.HashSet[Visitor]()

  locally {
    val sweeper = new Thread(() => while (!getServerSocket.isClosed) { Thread.sleep(1000); closeLate() }, "kiln-door")
    sweeper.setDaemon(true)
    sweeper.start()
  }

  override def accept(): TSocket = {
    val socket = try getServerSocket.accept() catch { case error: IOException => throw new TTransportException(error) }
    val visitor = new Visitor(socket)
    val crowded = synchronized {
      fresh += visitor
      if (fresh.size <= MostNew) None else Some(fresh.groupBy(_.from).values.maxBy(_.size).head)
    }
    crowded.foreach(_.close())
    visitor
  }

  private def closeLate(): Unit = synchronized(fresh.takeWhile(_.isLate).toSeq).foreach(_.close())

  /** Thrift's negotiation with SASL's mechanism PLAIN (RFC 4616). Each message is a status, a length and that many bytes; afterwards come
    * frames. Kiln reads it itself because Thrift's own reader takes memory for 100 MB before a password is known. */
  private def logIn(visitor: Visitor): TTransport = {
    val in = new DataInputStream(visitor.getSocket.getInputStream)
    val out = new DataOutputStream(visitor.getSocket.getOutputStream)
    def read(): (Int, String) = {
      val status = in.readUnsignedByte()
      val size = in.readInt()
      if (size < 0 || size > LargestLogin) end("a login of that size is not possible")
      val text = new Array[Byte](size)
      in.readFully(text)
      (status, new String(text, UTF_8))
    }
    def reply(status: Int, text: String): Unit = {
      val bytes = text.getBytes(UTF_8)
      out.writeByte(status)
      out.writeInt(bytes.length)
      out.write(bytes)
      out.flush()
    }
    def refuse(why: String): Nothing = {
      reply(3, why)
      end(why)
    }
    try {
      if (read() != ((1, "PLAIN"))) refuse("the mechanism PLAIN is the only one")
      val (name, word) = read()._2.split("\u0000", -1) match {
        case Array(_, name, word) => (name, word)
        case _ => refuse("Error validating the login")
      }
      if (isFlooded(visitor)) refuse("too many wrong passwords from here: try again in some seconds")
      if (!login.admits(name, word)) {
        val seconds = synchronized {
          if (wrong.isEmpty) logWarning(s"wrong user or password from ${visitor.from.getHostAddress}")
          fresh -= visitor
          wrong += visitor
          math.min(wrong.count(_.from == visitor.from), LongestWait)
        }
        try Thread.sleep(seconds * 1000L)
        finally synchronized(wrong -= visitor)
        refuse("Error validating the login")
      }
      synchronized {
        if (clients.size >= MostClients) refuse(s"there are $MostClients clients already: close one")
        fresh -= visitor
        clients += visitor
      }
      reply(5, "")
      new TFramedTransport(visitor, LargestMessage)
    } catch { case error: IOException => end(error.getMessage) }
  }

  // Thrift's server logs other types with their stack: strangers would fill the log.
  private def end(why: String): Nothing = throw new TTransportException(TTransportException.END_OF_FILE, why)

  private def isFlooded(visitor: Visitor): Boolean = synchronized {
    wrong.size >= MostWrong || wrong.count(_.from == visitor.from) >= MostWrongOfOne
  }
}

/** HiveServer2's calls, through the door: settings of a client are refused, and errors are cut to what speaks of its own query. */
class Service(cli: CLIService, login: Login) extends ThriftBinaryCLIService(cli) {
  private def isAllowed(key: String, value: String): Boolean = key match {
    case "use:database" => value.equalsIgnoreCase("default")
    case "set:hiveconf:hive.server2.thrift.resultset.default.fetch.size" => true
    case _ => false
  }

  private val guarded = Proxy.newProxyInstance(
    classOf[TCLIService.Iface].getClassLoader,
    Array(classOf[TCLIService.Iface]),
    (_, method, arguments) =>
      try {
        val answer = method.invoke(this, arguments: _*)
        answer.getClass.getMethods.find(_.getName == "getStatus").foreach(status => Errors.cut(status.invoke(answer)))
        Errors.cut(answer)
        answer
      } catch { case error: InvocationTargetException => throw error.getCause }
  ).asInstanceOf[TCLIService.Iface]

  override def OpenSession(request: TOpenSessionReq): TOpenSessionResp = {
    val asked = Option(request.getConfiguration).fold(Map.empty[String, String])(_.asScala.toMap)
    asked.find { case (key, value) => !isAllowed(key, value) } match {
      case None =>
        request.setUsername(login.user)
        super.OpenSession(request)
      case Some((key, _)) =>
        val status = new TStatus(TStatusCode.ERROR_STATUS)
        status.setSqlState("42501")
        status.setErrorMessage(s"[KILN_READ_ONLY] the lake is read-only: no client sets $key")
        new TOpenSessionResp(status, request.getClient_protocol)
    }
  }

  override def ExecuteStatement(request: TExecuteStatementReq): TExecuteStatementResp = {
    request.unsetConfOverlay()
    super.ExecuteStatement(request)
  }

  override protected def initializeServer(): Unit = {
    val door = new Door(new InetSocketAddress(hiveHost, portNum), login)
    val most = Door.MostNew + Door.MostWrong + Door.MostClients + 64 // those whose connection was just closed
    val threads = new ThreadPoolExecutor(1, most, 60, TimeUnit.SECONDS, new SynchronousQueue[Runnable]())
    val protocol = new TBinaryProtocol.Factory(true, true, Door.LargestMessage, Door.LargestMessage)
    server = new TThreadPoolServer(
      new TThreadPoolServer.Args(door)
        .processor(new TCLIService.Processor(guarded))
        .transportFactory(new TTransportFactory {
          override def getTransport(base: TTransport): TTransport = base.asInstanceOf[door.Visitor].session
        })
        .protocolFactory(protocol)
        .executorService(threads)
    )
    server.setServerEventHandler(serverEventHandler)
  }
}

/** What clients learn of an error. The message of an exception may quote a file, so only messages that speak of the query and of the
  * lake's rows go out: those of SQL's classes 42 (syntax and names), 22 (values) and 0A (features). Of others the condition goes out. The
  * server's log has all. */
object Errors {
  private val Message = """(?s).*?\[([A-Z][A-Z0-9_.]*)\]\s(?:[\w.$]+:\s(?:\[\1\]\s)?)?(.*)""".r
  private val open = Set("42", "22", "0A")

  def cut(part: AnyRef): Unit = part match {
    case status: TStatus if status.isSetErrorMessage =>
      status.setErrorMessage(message(status.getErrorMessage, status.getSqlState))
      status.unsetInfoMessages() // the stack, with the messages of all causes
    case state: TGetOperationStatusResp if state.isSetErrorMessage =>
      state.setErrorMessage(message(state.getErrorMessage, state.getSqlState))
    case _ =>
  }

  def message(text: String, state: String): String = text match {
    case Message(condition, rest) if state != null && open(state.take(2)) && !condition.startsWith("DELTA_") =>
      s"[$condition] ${rest.linesIterator.takeWhile(!_.startsWith("\tat ")).mkString("\n").trim}"
    case Message(condition, _) if state != null => s"[$condition] the query failed. The server's log says why."
    case _ => "the query failed. The server's log says why."
  }
}
